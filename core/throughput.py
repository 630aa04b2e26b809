"""How fast it goes: what steps take, how long requests stay, how much of their prompts has to be computed.

Means that fade, learnt from every step and ending; nothing here knows of requests or deadlines. No clock is read: results
say how long they took, and the caller when they came. The same results at the same times give the same means.
"""

from __future__ import annotations

_MEMORY = 32
"""Steps, or endings, over which a measurement fades."""
_COMPUTING_MEMORY = 8
"""Steps over which the rate of computing fades."""
_LEAST_TOKENS = 32
"""Smaller steps say how fast weights are read, not what one more token costs."""
_MOST_SURPRISE = 8
"""A step counts as no more than so many times its kind's mean: a process that was stopped says nothing of the next step."""


class Mean:
    """Of the last values; at first, of all."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return self._count > 0

    def note(self, value: float) -> None:
        """Take in one more."""
        if self._count < _MEMORY:
            self._count += 1
        self.value += (value - self.value) / self._count

    def note_time(self, value: float) -> None:
        """Take in a time, which may be out of all proportion."""
        self.note(min(value, _MOST_SURPRISE * self.value) if self._count else value)


class Throughput:
    """The measurements of one executor."""

    __slots__ = (
        "_computing_ns",
        "_last_ns",
        "_milli_tokens",
        "computed_share",
        "decode_ns",
        "outputs",
        "step_ns",
        "token_ns",
    )

    def __init__(self) -> None:
        self.step_ns = Mean()
        """From one result to the next, while there is something to do."""
        self.decode_ns = Mean()
        """The same, of steps in which every row computes one token."""
        self.token_ns = Mean()
        """What each token beyond that adds."""
        self.outputs = Mean()
        """Outputs of a request when it left its slot for good: how many steps it stayed."""
        self.computed_share = Mean()
        """Of a prompt, what had to be computed: not found in a cache."""
        self._last_ns = 0
        self._computing_ns = 0
        self._milli_tokens = 0

    def note_computing(self, num_tokens: int, compute_ns: int) -> None:
        """Learn what a token costs from how long the executor computed. Each step weighs as many tokens as it had."""
        if num_tokens < _LEAST_TOKENS:
            return
        self._computing_ns += compute_ns - self._computing_ns // _COMPUTING_MEMORY
        self._milli_tokens += 1000 * num_tokens - self._milli_tokens // _COMPUTING_MEMORY

    def time_of(self, num_tokens: int) -> int | None:
        """Return how long computing so many tokens takes, in nanoseconds; None before anything was measured."""
        return (
            1000 * num_tokens * self._computing_ns // self._milli_tokens if self._computing_ns > 0 else None
        )

    def tokens_in(self, time_ns: int) -> int | None:
        """Return how many tokens a step computes in this time; None before any was measured."""
        return self._milli_tokens * time_ns // (1000 * self._computing_ns) if self._computing_ns > 0 else None

    def note_step(self, num_rows: int, num_tokens: int, planned_ns: int, now_ns: int) -> None:
        """Learn from a step whose result is here. It began when it was planned, or when the one before it ended."""
        took_ns = max(0, now_ns - max(planned_ns, self._last_ns))
        self._last_ns = now_ns
        self.step_ns.note_time(took_ns)
        num_more = num_tokens - num_rows
        if num_more == 0:
            self.decode_ns.note_time(took_ns)
        else:
            self.token_ns.note_time(max(0.0, took_ns - self.decode_ns.value) / num_more)
