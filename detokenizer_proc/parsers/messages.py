"""Outputs as messages, each with a header that gives the type of its text: Inkling's and Muse Glimmer's.

<|message_model|><|content_thinking|>…<|end_message|><|message_model|>f<|content_invoke_tool_json|>{…}<|end_message|>
<|start|>assistant to=self<|message|>…<|eom|><|start|>assistant to=f<|message|><atem:function_calls>…<|eot|>
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.interface import MAX_NAME, ChannelText, Parser
from quintet.detokenizer_proc.parsers.machine import Machine, Prose
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.wire.channels import Channel

MAX_HEADER = 2 * MAX_NAME


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Syntax of a model's messages."""

    start: str
    """Mark before a header. The prompt may end with it, and with the beginning of the header."""
    bodies: tuple[str, ...]
    """Marks between a header and a message's text."""
    ends: tuple[str, ...]
    """Marks after a message."""
    reasoning: str
    """Header of reasoning, with the mark after it."""
    answer: str
    """Header of an answer, with the marks around it."""
    is_header: Callable[[str], bool]
    """Returns whether a text may be a header or its beginning. Other text before a message is content."""
    call_mark: str = ""
    """Mark of ``bodies`` that begins a call for its reader."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text, without those of the calls."""
        return frozenset({self.start, *self.bodies, *self.ends})


class Messages(Machine):
    """Parses messages of a `MessageFormat`. Text without a header is an answer, and so is a header without a message."""

    def __init__(
        self, form: MessageFormat, prompt: str, calls: Callable[[], Parser] | None, *, with_reasoning: bool
    ) -> None:
        """``calls``: builds the parser of a message. None, and ``with_reasoning`` false: calls and reasoning are content."""
        super().__init__(Messages._in_header)
        self._form = form
        self._build_calls = calls
        self._with_reasoning = with_reasoning
        self._marks = Marks(form.start, *form.bodies, *form.ends)
        self._header = ""
        self._has_mark = False  # a mark was read
        self._calls: Parser | None = None
        self._num_calls = 0
        self._num_calls_before = 0  # calls of earlier messages
        self._prose = Prose(Channel.CONTENT, leading=False)
        self._is_empty = True  # no text of the message was emitted
        self._is_call = False  # the message's header is not that of an answer
        self._used_channels: set[Channel] = set()
        if prompt.rstrip().endswith(form.reasoning):
            self._begin(form.reasoning)

    def _in_header(self) -> bool:
        """Read the text between messages, which may be the header of the next one."""
        before, mark, rest = self._split()
        header = self._header + before
        self._header = ""
        is_header = len(header) <= MAX_HEADER and self._form.is_header(header)
        self._text = rest
        if is_header and mark in self._form.bodies:
            self._begin(header + mark)
            return True
        if is_header and mark and header.strip() in {"", "assistant"}:
            self._has_mark = True
            return True
        if is_header and not mark and not self._over:
            self._header = header
            return False
        if is_header and not mark and self._is_cut and (self._has_mark or "=" in header):
            return False
        self._text = mark + rest
        self._begin("")
        self._add(header)
        return True

    def _split(self) -> tuple[str, str, str]:
        """Return the text before the next mark, the mark, and the text after it. Half a mark of a cut output is dropped."""
        before, mark, rest = self._marks.split(self._text)
        if self._over and not mark:
            is_dropped = self._is_cut and (self._has_mark or self._marks.is_half(rest))
            before, rest = before + ("" if is_dropped else rest), ""
        return before, mark, rest

    def _begin(self, header: str) -> None:
        """Begin a message. Its header includes the mark before the text; an empty one begins text without a header."""
        self._has_mark = self._has_mark or bool(header)
        self.is_reasoning = header.endswith(self._form.reasoning)
        is_thought = self.is_reasoning and self._with_reasoning
        self._prose = Prose(Channel.REASONING if is_thought else Channel.CONTENT, leading=self._has_mark)
        self._is_empty = True
        self._is_call = not self._form.answer.endswith(header.strip())
        self._calls = self._build_calls() if self._build_calls is not None and not self.is_reasoning else None
        self._state = Messages._in_message
        mark = self._form.call_mark
        if mark and header.endswith(mark) and self._calls is not None:
            self._add(mark)

    def _in_message(self) -> bool:
        before, mark, rest = self._split()
        self._text = rest
        self._add(before)
        if not (mark or self._over):
            return False
        if self._calls is not None:
            is_cut = self._is_cut and not mark
            deltas = self._calls.finish(is_cut=is_cut)
            is_partial = is_cut and self._is_call and self._is_empty  # of the first mark
            self._forward([each for each in deltas if not (is_partial and each.channel is Channel.CONTENT)])
        self._calls, self._num_calls_before = None, self._num_calls
        if not mark:
            self._emit(self._prose.channel, self._prose.end())
            return False
        self._has_mark, self.is_reasoning = True, False
        self._state = Messages._in_header
        if mark in self._form.bodies:
            self._begin(mark)
        return True

    def _add(self, text: str) -> None:
        if self._calls is None:
            self._emit_text(text)
        else:
            self._forward(self._calls.push(text))

    def _forward(self, deltas: list[ChannelText]) -> None:
        for channel, call, text in deltas:
            if channel is Channel.CONTENT:
                self._emit_text(text)
                continue
            if channel is Channel.NAME:
                self._prose.at_mark()
                self._num_calls += 1
            self._emit(channel, text, self._num_calls_before + call)

    def _emit_text(self, text: str) -> None:
        """Emit text of the message. Messages of one channel are separated by newlines."""
        text, channel = self._prose.take(text), self._prose.channel
        if not text:
            return
        if self._is_empty and channel in self._used_channels:
            self._emit(channel, "\n")
        self._is_empty = False
        self._used_channels.add(channel)
        self._emit(channel, text)
