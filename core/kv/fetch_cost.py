"""Measured cost of fetching, compared with computing. Callers pass durations; it reads no clock."""

from __future__ import annotations

OUTLIER_FACTOR = 8
"""Outlier limit: a sample counts at most this multiple of the mean, because a fetch may have been suspended."""
TRY_EVERY = 32
"""After this many rejected fetches the measurement is discarded, because fetching may be faster now."""


class FetchCost:
    """Exponential moving average of the time of one fetch."""

    __slots__ = ("_num_rejected", "each_ns")

    def __init__(self) -> None:
        self.each_ns: float | None = None
        """None before the first measurement."""
        self._num_rejected = 0

    def note(self, number: int, took_ns: int) -> None:
        """Add a measurement: ``number`` (at least 1) fetches took ``took_ns`` together."""
        each_ns = took_ns / number
        old_ns = each_ns if self.each_ns is None else self.each_ns
        self.each_ns = (3 * old_ns + min(each_ns, OUTLIER_FACTOR * old_ns)) / 4

    def is_cheaper(self, number: int, computing_ns: int | None) -> bool:
        """Return True when the fetches take less time than computing, or nothing is measured yet."""
        if computing_ns is None or self.each_ns is None or number * self.each_ns < computing_ns:
            return True
        self._num_rejected += 1
        if self._num_rejected % TRY_EVERY == 0:
            self.each_ns = None
        return self.each_ns is None
