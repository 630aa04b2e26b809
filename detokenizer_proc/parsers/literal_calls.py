"""Tool calls written like code: Python's ``name(key=value)``, Gemma's ``call:name{key:value}``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.literals import JSON, PYTHON, Literals, Notation
from quintet.detokenizer_proc.parsers.machine import LINE, ListReader

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"\s*(?:(?P<end>\))|[A-Za-z_]\w*\s*=(?!=))")
_FENCE = re.compile(r"```\w{0,16}\s{1,64}(?=[A-Za-z_\[])")
_PART_OF_KEY = re.compile(r"\s*(?:[A-Za-z_]\w*\s*)?=?")


@dataclass(frozen=True, slots=True)
class LiteralFormat:
    """Syntax of a model's calls."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    """A list of calls, or a call with ``prefix``, may begin a line without a mark."""
    prefix: str = ""
    """Text before a name. After a mark it may be missing, or have another colon before it."""
    openings: str = "("
    """Brackets after a name."""
    has_lines: bool = False
    """Calls within marks are on separate lines, without a separator."""
    notation: Notation = PYTHON

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        quotes = () if self.notation.has_escapes else self.notation.quotes
        return frozenset({*self.begins, *self.ends, *quotes})


class LiteralCalls(ListReader):
    """Parses calls of a `LiteralFormat`."""

    def __init__(self, form: LiteralFormat) -> None:
        super().__init__(form.begins, form.ends, ",", bare=(LINE,) if form.is_bare else ())
        self._form = form
        self._values = Literals(form.notation)
        self._is_unmarked = form.is_bare

    def _on_mark(self, mark: str) -> bool:
        self._is_unmarked = mark == LINE
        return super()._on_mark(mark)

    def _read_start(self) -> bool:
        """Read the beginning of a list or a call until it is certain to be a call."""
        if not self._skip_blanks():
            return self._reject() if self._over else False
        form = self._form
        if self._text[0] == "`" and not (self._is_fenced or self._is_unmarked):
            return self._read_fence(_FENCE)
        if self._text[0] == "[" and not self._is_list:
            self._take(1)
            self._is_list = True
            return True
        if self._skip_list_end():
            return True
        if self._is_unmarked and not (self._is_list or form.prefix):
            return self._reject()
        text = self._text
        begin = self._after_prefix(text)
        if begin is None:
            return self._over and self._reject()
        if self._is_unmarked and not text.startswith(form.prefix):
            return self._reject()
        match = _NAME.match(text, begin)
        end = begin if match is None else match.end()
        if end == len(text):
            return self._reject() if self._over or end > MAX_NAME else False
        if match is None or text[end] not in form.openings or end > MAX_NAME:
            return self._reject()
        if form.openings == "(":
            key = _KEY.match(text, end + 1)
            if key is None or (key["end"] is None and key.end() == len(text)):  # "=" may become "=="
                part = _PART_OF_KEY.match(text, end + 1)
                may_be = part is not None and part.end() == len(text) and len(text) - end <= MAX_NAME
                return False if may_be and not self._over else self._reject()
            if key.end() - end > MAX_NAME:
                return self._reject()
        self._take(end + 1)
        self._start_call(text[begin:end])
        self._is_inside = self._is_list or form.has_lines
        self._emit_arguments("{")
        self._state = LiteralCalls._before_values
        return True

    def _after_prefix(self, text: str) -> int | None:
        """Return the position of a name, after its prefix; None until more text decides."""
        prefix = self._form.prefix
        at = 1 if prefix and text[0] == ":" and not self._is_unmarked else 0
        if prefix.startswith(text[at:]):
            return None
        return at + len(prefix) if text.startswith(prefix, at) else at

    def _before_values(self) -> bool:
        """Choose the notation: some models write JSON in place of their own."""
        if not self._skip_blanks() and not self._over:
            return False
        is_json = self._form.openings != "(" and self._text[:1] == '"'
        self._values = Literals(JSON if is_json else self._form.notation, self._form.ends)
        self._state = LiteralCalls._in_call
        return True

    def _in_call(self) -> bool:
        self._take(self._values.read(self._text, is_last=self._over))
        if self._over and not (self._is_cut or self._values.is_over):
            self._values.close()
        self._emit_arguments(self._values.take())
        return self._end_once(self._values.is_over)

    def _after(self) -> bool:
        """Read a call on another line, or as in other lists."""
        if self._form.has_lines and self._is_inside and self._skip_blanks() and _NAME.match(self._text):
            self._attempt("")
            self._state = LiteralCalls._read_start
            return True
        return super()._after()
