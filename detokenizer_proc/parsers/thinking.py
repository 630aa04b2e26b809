"""Reasoning between two marks before the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser
from quintet.detokenizer_proc.parsers.machine import Machine, Prose
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.wire.channels import Channel, is_inside

MAX_REPARSED = 1024
"""Characters; keeps the work linear in the text."""


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """Marks of a model's reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    begins_inside: bool = False
    """The output starts inside reasoning unless the prompt says otherwise."""
    breaks: tuple[str, ...] = ()
    """Marks that end reasoning and belong to the text that follows."""
    around: tuple[str, ...] = ()
    """Marks around the answer; ignored."""
    first: tuple[str, ...] = ()
    """Texts that begin reasoning at the start of the output: some models omit the opening mark before its name."""
    is_repeated: bool = False
    """Reasoning may also follow content, and a closing mark without reasoning may end the output."""
    within: tuple[str, ...] = ()
    """Special tokens inside marks."""
    is_kept: bool = False
    """Reasoning stays in the content with its marks, for clients that return only the content."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        return frozenset({*self.opens, *self.closes, *self.breaks, *self.around, *self.within})


class Thinking(Machine):
    """Parses reasoning of a `ThinkFormat`: the first one, or all if it ``is_repeated``.

    Other marks are content, so an answer may mention them.

    A tool call also ends the reasoning. The text after a call's mark is held back until it names a function or is
    certain to be no call.
    """

    def __init__(
        self,
        form: ThinkFormat,
        prompt: str,
        call_marks: frozenset[str] = frozenset(),
        build_calls: Callable[[], Parser] | None = None,
    ) -> None:
        """``call_marks`` begin a call, or a group of calls; ``build_calls`` builds a parser to check that one does."""
        inside = is_inside(prompt, form.opens, form.closes, form.begins_inside)
        super().__init__(Thinking._first if inside else Thinking._start)
        self.is_reasoning = inside
        self._form = form
        self._opens = Marks(*form.opens)
        self._closes = Marks(*form.closes)
        self._firsts = Marks(*form.closes, *form.first)
        self._ends = Marks(*form.closes, *form.breaks)
        self._build_calls = build_calls
        self._begins = call_marks - self._ends.marks
        self._turns = Marks(*self._ends.marks, *self._begins)
        self._probe: Parser | None = None
        self._attempted: list[str] = []
        """Mark of a possible call, and the text read after it."""
        self.content_before_break: int | None = None
        """Characters of content before reasoning that a call ended; None if no call did."""
        self._num_content = 0
        repeated = (*form.opens, *form.closes) if form.is_repeated else ()
        self._in_answer = Marks(*form.around, *repeated)
        self._content_marks = Marks(*form.around, *(repeated or form.opens))
        self._reasoning = Prose(Channel.REASONING, leading=True)
        self._begins_thought = self._has_thought = False
        self._content = Prose(Channel.CONTENT, leading=False)

    def _emit_prose(self, prose: Prose, text: str) -> None:
        text = prose.take(text)
        if prose is self._content:
            self._num_content += len(text)
        elif text:
            if self._begins_thought and self._has_thought:
                text = "\n" + text
            self._begins_thought, self._has_thought = False, True
        self._emit(prose.channel, text)

    def _until(self, marks: Marks) -> tuple[str, str]:
        """Consume text up to a mark, and the mark."""
        before, mark, self._text = marks.split(self._text)
        if self._over and not mark:
            is_part = self._text.startswith(self._form.within)  # of a mark of several tokens
            before, self._text = before + ("" if is_part else self._text), ""
        return before, mark

    def _start(self) -> bool:
        """Skip a closing mark that repeats the prompt's, or read the first text of reasoning."""
        text = self._text.lstrip()
        self._emit_prose(self._content, self._text[: len(self._text) - len(text)])
        self._text = text
        mark = self._firsts.at_start(text) if text else ""
        if mark == "" and not self._over:
            return False
        if mark:
            self._text = text[len(mark) :]
            self._content.at_mark()
        self._state = Thinking._in_content
        if mark in self._form.first:
            self._begin_reasoning()
        return True

    def _in_content(self) -> bool:
        """Read text before reasoning, or the answer after it."""
        before, mark = self._until(self._content_marks)
        self._emit_prose(self._content, before)
        if mark in self._closes.marks and (self._text.strip() or not self._over):
            if not self._text.strip() and len(self._text) <= MAX_REPARSED:  # the mark may end the output
                self._text = mark + self._text
                return False
            self._emit_prose(self._content, mark)
        elif mark:
            self._content.at_mark()
        if mark in self._opens.marks:
            self._begin_reasoning()
        elif self._over and not mark:
            self._emit(Channel.CONTENT, self._content.end())
        return bool(mark)

    def _begin_reasoning(self) -> None:
        self.is_reasoning = self._begins_thought = True
        self._reasoning = Prose(Channel.REASONING, leading=True)
        self._state = Thinking._inside

    def _first(self) -> bool:
        """Skip an opening mark that repeats the prompt's."""
        self._text = text = self._text.lstrip()
        mark = self._opens.at_start(text) if text else ""
        if mark == "" and not self._over:
            return False
        if mark:
            self._text = text[len(mark) :]
        self._state = Thinking._inside
        return True

    def _inside(self) -> bool:
        before, mark = self._until(self._turns)
        self._emit_prose(self._reasoning, before)
        if mark in self._begins:
            assert self._build_calls is not None
            self.is_reasoning = False
            self._probe, self._attempted = self._build_calls(), [mark]
            self._probe.push(mark)
            self._state = Thinking._in_attempt
        elif mark in self._form.breaks:
            self._break_reasoning(mark)
        elif mark:
            self._end_reasoning("")
        elif self._over:
            self._emit(Channel.REASONING, self._reasoning.end())
        return bool(mark)

    def _end_reasoning(self, first: str) -> None:
        """End the reasoning and push ``first`` back in front of the unread text."""
        self.is_reasoning = False
        self._content.at_mark()
        self._text = first + self._text
        self._content_marks = self._in_answer
        self._state = Thinking._in_content

    def _break_reasoning(self, first: str) -> None:
        if self.content_before_break is None:
            self.content_before_break = self._num_content
        self._end_reasoning(first)

    def _in_attempt(self) -> bool:
        """Read the text after a call's mark until it is certain whether it is a call."""
        assert self._probe is not None
        before, end, rest = self._ends.split(self._text)
        if self._over and not end:
            before, rest = before + rest, ""
        found, num_read = None, 0
        while found is None and num_read < len(before):
            sign = before[num_read]  # by character: text after the decision is not consumed
            self._attempted.append(sign)
            deltas = self._probe.push(sign)
            found = deltas[0].channel if deltas else None
            num_read += 1
        self._text = before[num_read:] + end + rest
        if found is Channel.NAME or (found is None and self._is_cut and not end):
            self._break_reasoning("".join(self._attempted))
        elif found is not None or end or self._over:
            self._reject_call()
        else:
            return False
        return True

    def _reject_call(self) -> None:
        """Treat the mark as reasoning. The text read after it is parsed again, up to `MAX_REPARSED` characters."""
        mark, following = self._attempted[0], "".join(self._attempted[1:])
        self.is_reasoning = True
        self._state = Thinking._inside
        if len(following) > MAX_REPARSED:
            self._emit_prose(self._reasoning, mark + following)
            return
        self._emit_prose(self._reasoning, mark)
        self._text = following + self._text


class LateCloseFilter(Machine):
    """Removes a late closing mark of reasoning from the content after a call that ended the reasoning."""

    def __init__(self, form: ThinkFormat) -> None:
        super().__init__(LateCloseFilter._in_content)
        self._closes = Marks(*form.closes)
        self._prose = Prose(Channel.CONTENT, leading=False)

    def _in_content(self) -> bool:
        before, mark, self._text = self._closes.split(self._text)
        if self._over and not mark:
            before, self._text = before + self._text, ""
        self._emit(Channel.CONTENT, self._prose.take(before))
        if mark:
            self._prose.at_mark()
            self._closes = Marks()  # further ones are content
        elif self._over:
            self._emit(Channel.CONTENT, self._prose.end())
        return bool(mark)


class KeptReasoning:
    """Keeps reasoning in the content, for a format that ``is_kept``. The opening mark that the prompt has precedes it."""

    is_reasoning = False

    def __init__(self, form: ThinkFormat, prompt: str, calls: Parser | None) -> None:
        inside = is_inside(prompt, form.opens, form.closes, form.begins_inside)
        self._opening = form.opens[0] if inside else ""
        self._held = ""
        self._calls = calls

    def push(self, text: str) -> list[ChannelText]:
        if self._opening:
            self._held += text
            begin = self._held.lstrip()[: len(self._opening)]
            if self._opening.startswith(begin) and begin != self._opening:
                return []
            text = self._take_held(begin)
        if self._calls is not None:
            return self._calls.push(text)
        return [ChannelText(Channel.CONTENT, 0, text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        deltas = self.push(self._take_held("")) if self._held else []
        return deltas + (self._calls.finish(is_cut=is_cut) if self._calls is not None else [])

    def _take_held(self, begin: str) -> str:
        """Return the text held back, after the opening mark unless it begins with that mark."""
        text = self._held if begin == self._opening else self._opening + self._held
        self._opening = self._held = ""
        return text
