"""What fetching costs, as measured, against computing.

Knows no clock: whoever fetches says how long that took.
"""

from __future__ import annotations

MOST_SURPRISE = 8
"""A fetch counts as no more than so many times the mean: one that was stopped says nothing of the next."""
TRY_EVERY = 32
"""After so many requests for which computing looked cheaper, what was measured is forgotten: fetching may be faster now."""


class FetchCost:
    """How long fetching one thing takes, of one kind of things: a mean that fades."""

    __slots__ = ("_num_refused", "each_ns")

    def __init__(self) -> None:
        self.each_ns: float | None = None
        """None before anything was measured."""
        self._num_refused = 0

    def note(self, number: int, took_ns: int) -> None:
        """Learn that so many, at least one, took so long together."""
        each_ns = took_ns / number
        old_ns = each_ns if self.each_ns is None else self.each_ns
        self.each_ns = (3 * old_ns + min(each_ns, MOST_SURPRISE * old_ns)) / 4

    def is_cheaper(self, number: int, computing_ns: int | None) -> bool:
        """Return whether fetching so many takes less than computing does. What was not measured does."""
        if computing_ns is None or self.each_ns is None or number * self.each_ns < computing_ns:
            return True
        self._num_refused += 1
        if self._num_refused % TRY_EVERY == 0:
            self.each_ns = None
        return self.each_ns is None
