"""Measured throughput: step times, request lengths and prefix cache miss rates, as moving averages.

Learned from every step and ended request. Reads no clock: results carry durations, and the caller passes times. So
equal inputs give equal averages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WINDOW = 32
"""Averaging window, in steps or ended requests."""
_COMPUTE_WINDOW = 8
"""Averaging window of the compute speed, in steps."""
_LEAST_TOKENS = 32
"""Minimum extra tokens of a step to measure the time per token: smaller steps are bound by reading weights."""
_OUTLIER_FACTOR = 8
"""Outlier limit: a step counts at most this multiple of its mean, because the process may have been suspended."""


@dataclass(slots=True)
class Mean:
    """Exponential moving average; the plain mean of the first values."""

    value: float = 0.0
    _count: int = 0

    def __bool__(self) -> bool:
        """True once a value was added."""
        return self._count > 0

    def note(self, value: float) -> None:
        if self._count < _WINDOW:
            self._count += 1
        self.value += (value - self.value) / self._count

    def note_time(self, value: float) -> None:
        """Add a duration, limited as an outlier."""
        self.note(min(value, _OUTLIER_FACTOR * self.value) if self._count else value)


@dataclass(slots=True)
class Throughput:
    """Measurements of one executor."""

    step_ns: Mean = field(default_factory=Mean)
    """Time between results while there is work."""
    decode_ns: Mean = field(default_factory=Mean)
    """The same, for steps in which every row computes one token."""
    token_ns: Mean = field(default_factory=Mean)
    """Additional time per further token."""
    outputs: Mean = field(default_factory=Mean)
    tokens_per_draw: Mean = field(default_factory=Mean)
    """Tokens of a sampling row, more than 1 with accepted drafts; empty without drafts."""
    computed_share: Mean = field(default_factory=Mean)
    """Share of prompt tokens that were computed, not cached."""
    _last_ns: int = 0
    _computing_ns: int = 0
    _milli_tokens: int = 0

    def num_steps(self, num_outputs: float) -> float:
        """Return the number of steps in which a request gets this many outputs."""
        return num_outputs / self.tokens_per_draw.value if self.tokens_per_draw else num_outputs

    def note_computing(self, num_tokens: int, compute_ns: int) -> None:
        """Add an executor's compute time. Each step is weighted by its tokens."""
        if num_tokens < _LEAST_TOKENS:
            return
        self._computing_ns += compute_ns - self._computing_ns // _COMPUTE_WINDOW
        self._milli_tokens += 1000 * num_tokens - self._milli_tokens // _COMPUTE_WINDOW

    def time_of(self, num_tokens: int) -> int | None:
        """Return the time to compute this many tokens, in nanoseconds; None before the first measurement."""
        return (
            1000 * num_tokens * self._computing_ns // self._milli_tokens if self._computing_ns > 0 else None
        )

    def tokens_in(self, time_ns: int) -> int | None:
        """Return the number of tokens computed in this time; None before the first measurement."""
        return self._milli_tokens * time_ns // (1000 * self._computing_ns) if self._computing_ns > 0 else None

    def note_step(self, num_rows: int, num_tokens: int, planned_ns: int, now_ns: int) -> None:
        """Add a committed step. It started when it was planned or when the previous one ended."""
        took_ns = max(0, now_ns - max(planned_ns, self._last_ns))
        self._last_ns = now_ns
        self.step_ns.note_time(took_ns)
        num_more = num_tokens - num_rows
        if num_more == 0:
            self.decode_ns.note_time(took_ns)
        else:
            self.token_ns.note_time(max(0.0, took_ns - self.decode_ns.value) / num_more)
