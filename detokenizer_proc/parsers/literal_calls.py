"""Tool calls written like code: Python's ``name(key=value)``, Gemma's ``call:name{key:value}``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.literals import JSON, PYTHON, Literals, Notation
from quintet.detokenizer_proc.parsers.machine import MAX_NAME, ListReader

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"\s*(?:(?P<end>\))|[A-Za-z_]\w*\s*=(?!=))")
_PART_OF_KEY = re.compile(r"\s*(?:[A-Za-z_]\w*\s*)?=?")


@dataclass(frozen=True, slots=True)
class LiteralFormat:
    """Syntax of a model's calls."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    """A list of calls may begin a line without a mark."""
    prefix: str = ""
    """Text before a name."""
    opening: str = "("
    notation: Notation = PYTHON

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        quotes = () if self.notation.has_escapes else self.notation.quotes
        return frozenset({*self.begins, *self.ends, *quotes})


class LiteralCalls(ListReader):
    """Parses calls of a `LiteralFormat`."""

    def __init__(self, form: LiteralFormat) -> None:
        super().__init__(form.begins, form.ends, ",", is_bare=form.is_bare)
        self._form = form
        self._values = Literals(form.notation)
        self._requires_list = form.is_bare

    def _on_mark(self, mark: str) -> bool:
        self._requires_list = mark == "\n"
        return super()._on_mark(mark)

    def _read_start(self) -> bool:
        """Read the beginning of a list or a call until it is certain to be a call."""
        if not self._skip_blanks():
            return self._reject() if self._over else False
        form = self._form
        if self._text[0] == "[" and not self._is_list:
            self._take(1)
            self._is_list = True
            return True
        if self._requires_list and not self._is_list:
            return self._reject()
        text = self._text
        if not text.startswith(form.prefix):
            return False if form.prefix.startswith(text) and not self._over else self._reject()
        match = _NAME.match(text, len(form.prefix))
        end = len(form.prefix) if match is None else match.end()
        if end == len(text):
            return self._reject() if self._over or end > MAX_NAME else False
        if match is None or text[end] != form.opening or end > MAX_NAME:
            return self._reject()
        if form.opening == "(":
            key = _KEY.match(text, end + 1)
            if key is None or (key["end"] is None and key.end() == len(text)):  # "=" may become "=="
                part = _PART_OF_KEY.match(text, end + 1)
                may_be = part is not None and part.end() == len(text) and len(text) - end <= MAX_NAME
                return False if may_be and not self._over else self._reject()
            if key.end() - end > MAX_NAME:
                return self._reject()
        self._take(end + 1)
        self._start_call(text[len(form.prefix) : end])
        self._is_inside = self._is_list
        self._emit_arguments("{")
        self._state = LiteralCalls._before_values
        return True

    def _before_values(self) -> bool:
        """Choose the notation: some models write JSON in place of their own."""
        if not self._skip_blanks() and not self._over:
            return False
        is_json = self._form.opening == "{" and self._text[:1] == '"'
        self._values = Literals(JSON if is_json else self._form.notation)
        self._state = LiteralCalls._in_call
        return True

    def _in_call(self) -> bool:
        self._take(self._values.read(self._text, is_last=self._over))
        self._emit_arguments(self._values.take())
        return self._end_once(self._values.is_over)
