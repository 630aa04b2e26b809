"""Output parsing: splits the text of an output into channels and counts reasoning tokens and tool calls."""

from __future__ import annotations

import functools

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.parsers import registry
from quintet.detokenizer_proc.parsers.formats import REASONING, TOOLS
from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser, joined
from quintet.wire.channels import Channel, TextSpan
from quintet.wire.codec import unpack_i32
from quintet.wire.messages import PROMPT_TAIL, Open
from quintet.wire.request import Echo

MAX_TABLES = 8
"""Cached tables, one per pair of parsers; a server normally has one pair."""


class OutputReader:
    """Parses one output into text and the spans of its channels."""

    __slots__ = (
        "_parser",
        "_requires_calls",
        "_spans",
        "length",
        "num_calls",
        "num_reasoning_tokens",
        "stops_with_marks",
    )

    def __init__(
        self, parser: Parser, *, requires_calls: bool = False, stops_with_marks: frozenset[str] = frozenset()
    ) -> None:
        """``requires_calls``: the output must be tool calls, so content is markup of an incomplete call and is dropped."""
        self.stops_with_marks = stops_with_marks
        """Stop strings that contain a mark of the reasoning."""
        self.length = 0
        """Characters returned, of all channels."""
        self.num_reasoning_tokens = 0
        self.num_calls = 0
        self._parser = parser
        self._requires_calls = requires_calls
        self._spans: list[TextSpan] = []

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    def read(self, text: str) -> str:
        """Parse the text of one token, which may be empty; return the text to send."""
        parser = self._parser
        was_reasoning = parser.is_reasoning
        deltas = parser.push(text)
        if was_reasoning and parser.is_reasoning:
            self.num_reasoning_tokens += 1
        return self._add_spans(deltas)

    def finish(self, text: str = "", *, is_cut: bool = False) -> str:
        """Parse the flushed text and end the output; return the text held back. ``is_cut``: see `Parser.finish`."""
        return self._add_spans(self._parser.push(text) + self._parser.finish(is_cut=is_cut))

    def take_spans(self) -> list[TextSpan]:
        """Return the spans of the text returned since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _add_spans(self, deltas: list[ChannelText]) -> str:
        if self._requires_calls:
            deltas = [delta for delta in deltas if delta.channel is not Channel.CONTENT]
        if not deltas:
            return ""
        text_sent = ""
        spans = self._spans
        for channel, call, text in deltas if len(deltas) == 1 else joined(deltas):
            text_sent += text
            if channel is Channel.NAME:
                self.num_calls += 1
            if spans and spans[-1][:2] == (channel, call) and channel is not Channel.NAME:
                spans[-1] = (channel, call, spans[-1][2] + len(text))
            else:
                spans.append((int(channel), call, len(text)))
        self.length += len(text_sent)
        return text_sent


class OutputParsers:
    """Selects the piece table and the parsers of a request."""

    def __init__(self, showing: PieceTable) -> None:
        self._showing = showing
        self._table_for = functools.lru_cache(MAX_TABLES)(self._showing_marks)

    def table_of(self, opened: Open) -> PieceTable:
        """Return the table of a request. Parsers see their marks even if the request skips special tokens."""
        if not opened.skip_special_tokens:
            return self._showing
        if not _is_read(opened):
            return self._showing.skipping
        assert opened.parsing is not None
        return self._table_for(opened.parsing.reasoning, opened.parsing.tools)

    def _showing_marks(self, reasoning: str, tools: str) -> PieceTable:
        """Return a table that shows only the special tokens in the marks of these parsers."""
        return self._showing.skipping_special_tokens(registry.marks_of(reasoning, tools))

    def echo_table_of(self, opened: Open) -> PieceTable:
        return self._showing if opened.echo is Echo.WHOLE else self.table_of(opened)

    def reader_of(self, opened: Open) -> OutputReader | None:
        """Return a new reader for the request's output; None for plain text."""
        if not _is_read(opened):
            return None
        parsing = opened.parsing
        assert parsing is not None
        prompt = parsing.prompt_end or self._prompt_end(opened)
        parser = registry.build(parsing.reasoning, parsing.tools, parsing.schemas, prompt)
        marks = registry.marks_of(parsing.reasoning, "") if opened.stop else frozenset[str]()
        stops = frozenset(stop for stop in opened.stop if any(mark in stop for mark in marks))
        return OutputReader(parser, requires_calls=parsing.requires_calls, stops_with_marks=stops)

    def _prompt_end(self, opened: Open) -> str:
        decoder = self._showing.decoder()
        prompt_ids = unpack_i32(opened.prompt_ids)[-PROMPT_TAIL:]
        return "".join([decoder.push(token_id) for token_id in prompt_ids]) + decoder.flush()


def _is_read(opened: Open) -> bool:
    """Return whether the request has text and names parsers of this build."""
    parsing = opened.parsing
    return (
        parsing is not None
        and opened.detokenize
        and bool(parsing.reasoning or parsing.tools)
        and (not parsing.reasoning or parsing.reasoning in REASONING)
        and (not parsing.tools or parsing.tools in TOOLS)
    )
