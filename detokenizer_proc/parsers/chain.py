"""Chain of parsers: the tool call parser reads the content of the reasoning parser."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.parsers.pieces import ChannelText, Parser
from quintet.detokenizer_proc.parsers.thinking import LateCloseFilter, Thinking
from quintet.wire.channels import Channel


class Chain:
    """Reasoning parser, then tool call parser, then a filter for a closing mark that follows a call."""

    def __init__(self, reasoning: Thinking, tools: Parser, late: LateCloseFilter) -> None:
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
        return self._forward(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`."""
        found = self._forward(self._reasoning.finish(is_cut=is_cut))
        parsed = self._tools.finish(is_cut=is_cut)
        found += parsed if self._reasoning.content_before_break is None else self._filter_close(parsed)
        return found + self._late.finish(is_cut=is_cut)

    def _forward(self, pieces: Iterable[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for piece in pieces:
            if piece.channel is not Channel.CONTENT:
                found.append(piece)
                continue
            at = self._reasoning.content_before_break
            is_after_break = at is not None and self._num_content >= at
            self._num_content += len(piece.text)
            parsed = self._tools.push(piece.text)
            found += self._filter_close(parsed) if is_after_break else parsed
        return found

    def _filter_close(self, pieces: list[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for piece in pieces:
            found += self._late.push(piece.text) if piece.channel is Channel.CONTENT else [piece]
        return found
