"""A bound on reasoning in token ids: what the tokenizer process makes of ``thinking_token_budget`` for the executor."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Thinking(msgspec.Struct, array_like=True):
    """One way to reason: the mark that begins it, and what is drawn once there was enough of it."""

    opens: list[int]
    forced: list[int]


class ThinkingBound(msgspec.Struct, array_like=True):
    """How many tokens a request may reason."""

    max_tokens: int
    """Between the marks, neither counted."""
    ways: list[Thinking]
    closes: list[list[int]]
    """What ends reasoning, however it began."""
    begun: int | None = None
    """Which of the ways the prompt has begun; None where outputs begin outside."""

    @property
    def makes_sense(self) -> bool:
        """Whether an executor can do so."""
        return (
            self.max_tokens >= 0
            and bool(self.ways)
            and all(way.opens and way.forced for way in self.ways)
            and all(self.closes)
            and (self.begun is None or 0 <= self.begun < len(self.ways))
        )

    def ids(self) -> Iterator[int]:
        """Yield every token that is named."""
        for way in self.ways:
            yield from way.opens
            yield from way.forced
        for close in self.closes:
            yield from close
