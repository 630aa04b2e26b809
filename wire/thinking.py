"""Reasoning budget in token ids, which the tokenizer process derives from ``thinking_token_budget`` for the executor."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Thinking(msgspec.Struct, array_like=True):
    """One kind of reasoning: its opening mark, and the tokens that are forced once the budget is used up."""

    opens: list[int]
    forced: list[int]


class ThinkingBound(msgspec.Struct, array_like=True):
    """Reasoning budget of a request."""

    max_tokens: int
    """Between the marks, neither counted."""
    ways: list[Thinking]
    closes: list[list[int]]
    """Token sequences that end reasoning, for every kind."""
    begun: int | None = None
    """Index of the kind that the prompt has opened; None where the output starts outside reasoning."""

    @property
    def is_valid(self) -> bool:
        """True when the fields are valid."""
        return (
            self.max_tokens >= 0
            and bool(self.ways)
            and all(way.opens and way.forced for way in self.ways)
            and all(self.closes)
            and (self.begun is None or 0 <= self.begun < len(self.ways))
        )

    def ids(self) -> Iterator[int]:
        """Yield every token id in it."""
        for way in self.ways:
            yield from way.opens
            yield from way.forced
        for close in self.closes:
            yield from close
