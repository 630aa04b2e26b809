"""One parser behind another: what the first takes for content, the second reads."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.parsers.pieces import ChannelText, Parser
from quintet.detokenizer_proc.parsers.thinking import LateClose, Thinking
from quintet.wire.channels import Channel


class Chain:
    """A parser of reasoning, then one of calls, then one that removes a closing mark that comes behind a call."""

    def __init__(self, reasoning: Thinking, tools: Parser, late: LateClose) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._late = late
        self._num_content = 0

    @property
    def is_reasoning(self) -> bool:
        """See `Parser`."""
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[ChannelText]:
        """See `Parser`."""
        return self._pass_on(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`."""
        found = self._pass_on(self._reasoning.finish(is_cut=is_cut))
        told = self._tools.finish(is_cut=is_cut)
        found += told if self._reasoning.broken_off_at is None else self._without_close(told)
        return found + self._late.finish(is_cut=is_cut)

    def _pass_on(self, pieces: Iterable[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for piece in pieces:
            if piece.channel is not Channel.CONTENT:
                found.append(piece)
                continue
            at = self._reasoning.broken_off_at
            is_behind = at is not None and self._num_content >= at
            self._num_content += len(piece.text)
            told = self._tools.push(piece.text)
            found += self._without_close(told) if is_behind else told
        return found

    def _without_close(self, pieces: list[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for piece in pieces:
            found += self._late.push(piece.text) if piece.channel is Channel.CONTENT else [piece]
        return found
