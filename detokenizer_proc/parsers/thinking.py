"""Reasoning between two marks, before the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.machine import Machine, Prose
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.pieces import ChannelText, Parser
from quintet.wire.channels import Channel, is_inside

MAX_READ_AGAIN = 1024
"""Characters; so the work is linear in the text, whatever marks are in it."""


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """How a model marks its reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    begins_inside: bool = False
    """Whether output is reasoning from its first character where the prompt does not say so."""
    breaks: tuple[str, ...] = ()
    """What ends reasoning and belongs to what follows."""
    around: tuple[str, ...] = ()
    """What stands around the answer, and says nothing."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that must be seen."""
        return frozenset({*self.opens, *self.closes, *self.breaks, *self.around})


@dataclass(frozen=True, slots=True)
class CallsWithin:
    """Calls that may begin inside reasoning that was not closed."""

    marks: frozenset[str]
    """What begins a call, or several."""
    reader: Callable[[], Parser]
    """Makes a parser of calls, to find out whether a mark begins one."""


class Thinking(Machine):
    """Reads reasoning of a `ThinkFormat`; the first only, so that an answer may speak of the marks.

    A call ends the reasoning too. A mark of one does not: what follows it is held back until it names a function, or cannot.
    """

    def __init__(self, form: ThinkFormat, prompt: str, calls: CallsWithin | None = None) -> None:
        inside = is_inside(prompt, form.opens, form.closes, form.begins_inside)
        super().__init__(Thinking._first if inside else Thinking._before)
        self.is_reasoning = inside
        self._form = form
        self._opens = Marks(*form.opens)
        self._ends = Marks(*form.closes, *form.breaks)
        self._calls = calls
        self._begins = calls.marks - self._ends.marks if calls is not None else frozenset[str]()
        self._turns = Marks(*self._ends.marks, *self._begins)
        self._probe: Parser | None = None
        self._tried: list[str] = []
        """The mark of what may be a call, and what was read behind it."""
        self.broken_off_at: int | None = None
        """Characters of content before reasoning that a call ended; None where none did."""
        self._num_content = 0
        self._around = Marks(*form.around)
        self._reasoning = Prose(Channel.REASONING, leading=True)
        self._content = Prose(Channel.CONTENT, leading=False)

    def _say(self, prose: Prose, text: str) -> None:
        text = prose.take(text)
        if prose is self._content:
            self._num_content += len(text)
        self._tell(prose.channel, text)

    def _until(self, marks: Marks) -> tuple[str, str]:
        """Consume text up to a mark, and the mark."""
        before, mark, self._text = marks.split(self._text)
        if self._over and not mark:
            before, self._text = before + self._text, ""
        return before, mark

    def _before(self) -> bool:
        """Read what comes before reasoning."""
        before, mark = self._until(self._opens)
        self._say(self._content, before)
        if mark:
            self.is_reasoning = True
            self._content.at_mark()
            self._state = Thinking._inside
        elif self._over:
            self._tell(Channel.CONTENT, self._content.end())
        return bool(mark)

    def _first(self) -> bool:
        """Pass over a mark that repeats the prompt's."""
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
        self._say(self._reasoning, before)
        if mark in self._begins:
            assert self._calls is not None
            self.is_reasoning = False
            self._probe, self._tried = self._calls.reader(), [mark]
            self._probe.push(mark)
            self._state = Thinking._in_attempt
        elif mark in self._form.breaks:
            self._break_off(mark)
        elif mark:
            self._leave("")
        elif self._over:
            self._tell(Channel.REASONING, self._reasoning.end())
        return bool(mark)

    def _leave(self, first: str) -> None:
        """Go on behind the reasoning, with this text first."""
        self.is_reasoning = False
        self._content.at_mark()
        self._text = first + self._text
        self._state = Thinking._behind

    def _break_off(self, first: str) -> None:
        self.broken_off_at = self._num_content
        self._leave(first)

    def _in_attempt(self) -> bool:
        """Read what follows the mark of a call, up to where it certainly is one, or is none."""
        assert self._probe is not None
        before, end, rest = self._ends.split(self._text)
        if self._over and not end:
            before, rest = before + rest, ""
        found, num_read = None, 0
        while found is None and num_read < len(before):  # one at a time: what follows the decision is not its
            sign = before[num_read]
            self._tried.append(sign)
            found = _first_channel(self._probe.push(sign))
            num_read += 1
        self._text = before[num_read:] + end + rest
        if found is Channel.NAME or (found is None and self._is_cut and not end):
            self._break_off("".join(self._tried))
        elif found is not None or end or self._over:
            self._call_off()
        else:
            return False
        return True

    def _call_off(self) -> None:
        """It is no call: the mark is reasoning. What was read behind it is read again, if that is not much."""
        mark, behind = self._tried[0], "".join(self._tried[1:])
        self.is_reasoning = True
        self._state = Thinking._inside
        if len(behind) > MAX_READ_AGAIN:
            self._say(self._reasoning, mark + behind)
            return
        self._say(self._reasoning, mark)
        self._text = behind + self._text

    def _behind(self) -> bool:
        """Read the answer."""
        before, mark = self._until(self._around)
        self._say(self._content, before)
        if mark:
            self._content.at_mark()
        elif self._over:
            self._tell(Channel.CONTENT, self._content.end())
        return bool(mark)


def _first_channel(pieces: list[ChannelText]) -> Channel | None:
    return pieces[0].channel if pieces else None


class LateClose(Machine):
    """Content behind reasoning that a call broke off: leaves out the reasoning's closing mark, if it comes after all."""

    def __init__(self, form: ThinkFormat) -> None:
        super().__init__(LateClose._before)
        self._closes = Marks(*form.closes)
        self._prose = Prose(Channel.CONTENT, leading=False)

    def _before(self) -> bool:
        before, mark, self._text = self._closes.split(self._text)
        if self._over and not mark:
            before, self._text = before + self._text, ""
        self._tell(Channel.CONTENT, self._prose.take(before))
        if mark:
            self._prose.at_mark()
            self._state = LateClose._behind
        elif self._over:
            self._tell(Channel.CONTENT, self._prose.end())
        return bool(mark)

    def _behind(self) -> bool:
        text, self._text = self._text, ""
        self._tell(Channel.CONTENT, self._prose.take(text) + (self._prose.end() if self._over else ""))
        return False
