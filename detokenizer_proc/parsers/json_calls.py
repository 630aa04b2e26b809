"""Tool calls as JSON: an object with name and arguments, or a name followed by arguments; single, in lists, or in marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.json_scan import CallObject
from quintet.detokenizer_proc.parsers.machine import FENCE, LINE, PART_OF_FENCE, ListReader
from quintet.detokenizer_proc.parsers.marks import Marks

_FENCE = re.compile(r"```\w{0,16}\s{0,64}(?=[{\[])")
MAX_HEAD = 2 * MAX_NAME
"""Maximum characters between a mark and a call's arguments."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """Syntax of a model's calls."""

    begins: tuple[str, ...] = ()
    """Marks before a call or a list of calls."""
    ends: tuple[str, ...] = ()
    """Marks after a call."""
    around: tuple[str, ...] = ()
    """Marks around a group of calls; ignored."""
    bare: tuple[str, ...] = ()
    """Calls without a mark: `LINE`, if they begin a line, or brackets that begin them anywhere. They need arguments."""
    heads: tuple[str, ...] = ()
    """Marks between a name and its arguments. ``{`` also ends a name and belongs to the arguments."""
    strict_begins: tuple[str, ...] = ()
    """Those of ``begins`` and ``bare`` that other JSON follows too: a call needs arguments and has no other keys."""
    within: tuple[str, ...] = ()
    """Marks inside a head, parsed by `name_of`."""
    is_keyed: bool = False
    """A call is an object with one key, the name: ``{"f": {…}}``."""
    argument_key: str = ""
    """Key of the arguments, if it is not ``arguments`` or ``parameters``."""
    name_of: Callable[[str], str] = str.strip
    """Extracts the name from a head, the text between the mark and the arguments; empty if it has none."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        return frozenset({*self.begins, *self.ends, *self.around, *self.heads, *self.within})


class JsonCalls(ListReader):
    """Parses calls of a `JsonFormat`."""

    def __init__(self, form: JsonFormat) -> None:
        super().__init__((*form.begins, *form.around), form.ends, ",;{", bare=form.bare)
        self._form = form
        stops = {*form.begins, *form.ends, *form.around} - {FENCE}  # the call has no arguments
        self._heads = Marks(*form.heads, "{", *stops) if form.heads else None
        self._next_begins = Marks(*form.begins)
        self._surplus = "}"
        self._call = CallObject()
        self._head = ""
        self._is_called = False  # the name of the current call was emitted
        self._is_strict = LINE in form.strict_begins  # the last mark is one of ``strict_begins``

    def _on_mark(self, mark: str) -> bool:
        if mark in self._form.around:
            self._prose.at_mark()
            self._expects_calls = True
            return True
        self._is_strict = mark in self._form.strict_begins
        return super()._on_mark(mark)

    @property
    def _is_weak(self) -> bool:
        """True if other JSON may follow the last mark, so a call needs arguments."""
        return self._is_strict or bool(self._form.bare and not self._form.strict_begins)

    def _read_start(self) -> bool:
        """Read an object, the beginning of a list, or a name, after a mark or a comma."""
        if not self._skip_blanks():
            return self._reject() if self._over else False
        sign = self._text[0]
        if sign == "`" and not self._is_fenced:
            return self._read_fence(_FENCE)
        if sign == "[" and not self._is_list:
            mark = self._next_begins.at_start(self._text)
            if mark or (mark == "" and not self._over):
                return bool(mark) and self._reject()
            self._take(1)
            self._is_list = True
            return True
        if self._skip_list_end():
            return True
        self._is_called = False
        if sign == "{":
            self._call = CallObject(
                is_marked=not self._is_weak,
                is_strict=self._is_strict,
                is_keyed=self._form.is_keyed,
                argument_key=self._form.argument_key,
            )
            self._state = JsonCalls._in_call
        elif self._heads is None or self._is_list:
            return self._reject()
        else:
            self._head = ""
            self._state = JsonCalls._in_head
        return True

    def _in_call(self) -> bool:
        read = self._call
        self._take(read.read(self._text))
        if self._over and not read.is_over:
            read.end(is_cut=self._is_cut)
        if read.name and read.has_arguments and not self._is_called:
            self._call_by(read.name)
        if self._is_called:
            self._emit_arguments(read.take_arguments())
        if not (read.is_over or self._over):
            return False
        if not self._is_called:
            is_whole = read.is_over and not read.is_broken and not read.extra
            if not read.name or not is_whole or self._is_weak:
                return self._reject()
            self._call_by(read.name)
            self._emit_arguments("{}")
        self._state = JsonCalls._after
        if read.is_over or not self._is_cut:
            self._emit_prose(read.extra)
        return True

    def _is_partial_call(self) -> bool:
        return super()._is_partial_call() or (self._state is JsonCalls._in_call and self._call.describes_call)

    def _call_by(self, name: str) -> None:
        self._start_call(name)
        self._is_called = self._is_inside = True

    def _in_head(self) -> bool:
        assert self._heads is not None
        before, mark, _ = self._heads.split(self._text)
        num_free = MAX_HEAD - len(self._head)
        if len(before) > num_free:
            self._take(num_free + 1)
            return self._reject()
        self._head += self._take(len(before))
        if not mark and (not self._over or self._is_cut):
            return self._reject() if self._over else False
        name = self._form.name_of(self._head)
        if not name or len(name) > MAX_NAME or any(sign.isspace() or sign in "<>[]" for sign in name):
            return self._reject()
        self._call_by(name)
        self._state = JsonCalls._before_arguments
        if mark in self._form.heads:
            self._take(len(mark))
        elif mark != "{":
            self._emit_arguments("{}")
            self._state = JsonCalls._after
        return True

    def _before_arguments(self) -> bool:
        if not self._skip_blanks():
            if self._over:
                self._emit_arguments("" if self._is_cut else "{}")
                self._state = JsonCalls._after
            return self._over
        fence = _FENCE.match(self._text) if FENCE in self._form.ends else None
        if fence is not None:
            self._take(fence.end())
        elif FENCE in self._form.ends and not self._over and PART_OF_FENCE.fullmatch(self._text):
            return False
        if self._text[0] == "{":
            return self._begin_object()
        end = self._ends.at_start(self._text)
        if end == "" and not self._over:
            return False
        if end != "" or not self._is_cut:
            self._emit_arguments("{}")
        self._state = JsonCalls._after
        return True
