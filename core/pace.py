"""How fast the executor computes, learnt from its results: what a step of so many tokens will take.

The core reads no clock: results say how long they took. The same results in the same order give the same estimates.
"""

from __future__ import annotations

_MEMORY = 8
"""Steps over which a measurement fades."""
_LEAST_TOKENS = 32
"""Smaller steps say how fast weights are read, not what one more token costs."""


class Pace:
    """Nanoseconds per token of the last steps, each weighing as many tokens as it had."""

    __slots__ = ("_milli_tokens", "_ns")

    def __init__(self) -> None:
        self._ns = 0
        self._milli_tokens = 0

    def note(self, num_tokens: int, compute_ns: int) -> None:
        """Learn from one step."""
        if num_tokens < _LEAST_TOKENS:
            return
        self._ns += compute_ns - self._ns // _MEMORY
        self._milli_tokens += 1000 * num_tokens - self._milli_tokens // _MEMORY

    def time_of(self, num_tokens: int) -> int | None:
        """Return how long computing so many tokens takes, in nanoseconds; None before anything was measured."""
        return 1000 * num_tokens * self._ns // self._milli_tokens if self._ns > 0 else None

    def tokens_in(self, time_ns: int) -> int | None:
        """Return how many tokens a step computes in this time; None before any was measured."""
        return self._milli_tokens * time_ns // (1000 * self._ns) if self._ns > 0 else None
