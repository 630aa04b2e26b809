"""OpenAI's harmony format: messages with headers; channel and recipient give the type of the text.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>
"""

from __future__ import annotations

import re

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.json_repair import JsonRepair
from quintet.detokenizer_proc.parsers.machine import Machine, Prose
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.wire.channels import Channel

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

MAX_HEADER = 4 * MAX_NAME
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_BUILT_IN = frozenset({"browser", "container", "python"})
"""Tools that the model was trained to use in its reasoning; the server does not have them."""
_ROLES = frozenset({"all", "assistant", "user"})
"""Recipients that are no tools."""
_CHANNELS = re.compile(r"<\|channel\|>\s*(\w*)")
_HEADER = re.compile(
    r"(<\|start\|>)?\s*(assistant)?\s*"
    r"((to=[^\s<]+|<\|channel\|>\s*(analysis|commentary|final)?|<\|constrain\|>\s*[\w/+.-]*|json|code|text)\s*)*"
)
"""A model may write a channel twice; the last one counts."""
_MARKUP = re.compile(
    r"(<\|start\|>\s*(assistant\s*)?)?(<\|channel\|>\s*((?P<channel>analysis|commentary|final)\s*)?)*"
)
_HEADER_BEGINS = Marks(CHANNEL, START, MESSAGE, "to=")
_HEADER_ENDS = Marks(MESSAGE, START, *ENDS)
_MESSAGE_ENDS = Marks(START, *ENDS)
_MESSAGE_BEGINS = Marks(START, CHANNEL, *ENDS)
"""Unclosed reasoning and arguments also end there, even without the next header's start mark."""


class Harmony(Machine):
    """Parses messages incrementally. Text without a header, and a header without a message, are content."""

    marks = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})

    def __init__(self, *, with_reasoning: bool, with_calls: bool) -> None:
        """Reasoning or calls that are not enabled are content."""
        super().__init__(Harmony._first)
        self._with_reasoning = with_reasoning
        self._with_calls = with_calls
        self._header = ""
        self._num_calls = 0
        self._is_empty = True  # no text of the message was emitted
        self._used_channels: set[Channel] = set()
        self._prose = Prose(Channel.CONTENT, leading=False)
        self._repair = JsonRepair()

    def _first(self) -> bool:
        """Read the first header, which the prompt may have begun."""
        text = self._text.lstrip()
        self._emit_prose(self._text[: len(self._text) - len(text)])
        self._text = text
        mark = _HEADER_BEGINS.at_start(text) if text else ""
        if mark == "" and not self._over:
            return False
        self._state = Harmony._in_header if mark else Harmony._outside
        return True

    def _outside(self) -> bool:
        before, mark, self._text = _MESSAGE_BEGINS.split(self._text)
        if self._is_cut and not mark and (self._num_calls or _MESSAGE_BEGINS.is_half(self._text)):
            self._text = ""
        if self._over and not mark:
            before, self._text = before + self._text, ""
        self._emit_prose(before)
        if not mark:
            if self._over:
                self._emit(self._prose.channel, self._prose.end())
            return False
        self._prose.at_mark()
        if mark not in ENDS:
            self._header = mark
            self._state = Harmony._in_header
        return True

    def _in_header(self) -> bool:
        before, mark, rest = _HEADER_ENDS.split(self._text)
        if self._over and not mark:
            before, rest = before + rest, ""
        num_free = MAX_HEADER - len(self._header)
        if len(before) > num_free:
            self._header, self._text = self._header + before[: num_free + 1], self._text[num_free + 1 :]
            return self._emit_header()
        self._header += before
        self._text = rest
        if mark == MESSAGE:
            self._begin_message()
            return True
        if self._is_cut and not mark:
            self._state = Harmony._outside
            return True
        if mark in ENDS or (self._over and not mark):
            return self._emit_header()
        if mark and self._header not in {"", START}:
            self._emit_header()
        if mark:
            self._header, self._state = mark, Harmony._in_header
        return bool(mark)

    def _emit_header(self) -> bool:
        """Emit the text of a header without a message, or with unknown parts. It is content only if its channel would be."""
        markup = _MARKUP.match(self._header)
        assert markup is not None  # all parts are optional
        has_channel = CHANNEL in self._header
        is_thought = has_channel and markup["channel"] != "final" and self._with_reasoning
        self._prose = Prose(Channel.REASONING if is_thought else Channel.CONTENT, leading=True)
        is_dropped = has_channel and _RECIPIENT.search(self._header) is None
        self._emit_prose(self._header[markup.end() if is_dropped else 0 :])
        self._state = Harmony._outside
        return True

    def _begin_message(self) -> None:
        # collapse blanks first: the pattern would try every split of a run of blanks
        if _HEADER.fullmatch(" ".join(self._header.split())) is None:
            self._emit_header()
        recipient = _RECIPIENT.search(self._header)
        if recipient is not None and recipient[1] in _ROLES:
            recipient = None
        is_built_in = recipient is not None and recipient[1].partition(".")[0] in _BUILT_IN
        is_analysis = _CHANNELS.findall(self._header)[-1:] == ["analysis"]
        self._is_empty = True
        if recipient is not None and not is_built_in and self._with_calls:
            name = recipient[1].removeprefix(_FUNCTIONS) or recipient[1]
            self._emit(Channel.NAME, name, self._num_calls)
            self._num_calls += 1
            channel = Channel.ARGUMENTS
            self._repair = JsonRepair()
        elif (is_analysis or is_built_in) and self._with_reasoning:
            channel = Channel.REASONING
        else:
            channel = Channel.CONTENT
        self.is_reasoning = is_analysis
        self._prose = Prose(channel, leading=True)
        self._state = Harmony._in_message

    def _in_message(self) -> bool:
        is_call = self._prose.channel is Channel.ARGUMENTS
        ends = _MESSAGE_BEGINS if self.is_reasoning or is_call else _MESSAGE_ENDS
        before, mark, rest = ends.split(self._text)
        if self._over and not mark:
            before, rest = before + rest, ""
        self._text = rest
        self._emit_prose(before)
        if mark == CHANNEL and self._repair.in_string and is_call:
            self._emit_prose(mark)
            return True
        if is_call and (mark or self._over):
            held = self._repair.end(is_cut=self._is_cut and not mark)
            self._emit(Channel.ARGUMENTS, held, self._call_of_message())
        if not mark:
            if self._over:
                self._emit(self._prose.channel, self._prose.end(), self._call_of_message())
            return False
        if self._is_empty and is_call:
            self._emit(Channel.ARGUMENTS, "{}", self._call_of_message())
        self.is_reasoning = False
        self._prose = Prose(Channel.CONTENT, leading=True)
        self._header = mark
        self._state = Harmony._outside if mark in ENDS else Harmony._in_header
        return True

    def _call_of_message(self) -> int:
        return self._num_calls - 1 if self._prose.channel is Channel.ARGUMENTS else 0

    def _emit_prose(self, text: str) -> None:
        """Emit text of the message. Messages of one channel are separated by newlines."""
        channel = self._prose.channel
        text = self._prose.take(text)
        if not text:
            return
        if self._is_empty and channel in self._used_channels and channel is not Channel.ARGUMENTS:
            self._emit(channel, "\n")
        self._is_empty = False
        self._used_channels.add(channel)
        if channel is Channel.ARGUMENTS:
            text = self._repair.take(text)
        self._emit(channel, text, self._call_of_message())
