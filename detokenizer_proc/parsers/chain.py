"""One parser behind another: what the first takes for content, the second reads."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.parsers.pieces import Parser, Piece
from quintet.wire.channels import Channel


class Chain:
    """A parser of reasoning, then one of calls."""

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """See `Parser`."""
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return self._pass_on(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """See `Parser`."""
        return self._pass_on(self._reasoning.finish(is_cut=is_cut)) + self._tools.finish(is_cut=is_cut)

    def _pass_on(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if piece.channel is Channel.CONTENT:
                found += self._tools.push(piece.text)
            else:
                found.append(piece)
        return found
