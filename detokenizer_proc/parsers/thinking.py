"""Reasoning between two marks, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.machine import Machine, Prose
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.wire.channels import Channel, is_inside


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


class Thinking(Machine):
    """Reads reasoning of a `ThinkFormat`; the first only, so that an answer may speak of the marks."""

    def __init__(self, form: ThinkFormat, prompt: str) -> None:
        inside = is_inside(prompt, form.opens, form.closes, form.begins_inside)
        super().__init__(Thinking._first if inside else Thinking._before)
        self.is_reasoning = inside
        self._form = form
        self._opens = Marks(*form.opens)
        self._ends = Marks(*form.closes, *form.breaks)
        self._around = Marks(*form.around)
        self._reasoning = Prose(Channel.REASONING, leading=True)
        self._content = Prose(Channel.CONTENT, leading=False)

    def _say(self, prose: Prose, text: str) -> None:
        self._tell(prose.channel, prose.take(text))

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
        before, mark = self._until(self._ends)
        self._say(self._reasoning, before)
        if mark:
            self.is_reasoning = False
            self._content.at_mark()
            if mark in self._form.breaks:
                self._text = mark + self._text
            self._state = Thinking._behind
        elif self._over:
            self._tell(Channel.REASONING, self._reasoning.end())
        return bool(mark)

    def _behind(self) -> bool:
        """Read the answer."""
        before, mark = self._until(self._around)
        self._say(self._content, before)
        if mark:
            self._content.at_mark()
        elif self._over:
            self._tell(Channel.CONTENT, self._content.end())
        return bool(mark)
