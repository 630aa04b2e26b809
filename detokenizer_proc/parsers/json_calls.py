"""Calls as JSON: an object with name and arguments, or a name and then the arguments; alone, in lists, between marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.json_scan import CallObject, JsonValue
from quintet.detokenizer_proc.parsers.machine import MAX_NAME, ListReader
from quintet.detokenizer_proc.parsers.marks import Marks

MAX_HEAD = 2 * MAX_NAME
"""Characters that may stand between a mark and a call's arguments."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """How a model writes calls."""

    begins: tuple[str, ...] = ()
    """What stands before a call, or a list of calls."""
    ends: tuple[str, ...] = ()
    """What stands after one."""
    around: tuple[str, ...] = ()
    """What stands around several, and says nothing."""
    is_bare: bool = False
    """Whether a call may begin a line without any mark; then it must have arguments."""
    heads: tuple[str, ...] = ()
    """What may end a name that stands before the arguments. ``{`` ends it too, and is the arguments' own."""
    within: tuple[str, ...] = ()
    """What may stand inside of such a head, for `name_of`."""
    name_of: Callable[[str], str] = str.strip
    """The name in what stands between the mark and the end of the head; empty when it is no head."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that must be seen."""
        return frozenset({*self.begins, *self.ends, *self.around, *self.heads, *self.within})


class JsonCalls(ListReader):
    """Reads calls of a `JsonFormat`."""

    def __init__(self, form: JsonFormat) -> None:
        super().__init__((*form.begins, *form.around), form.ends, ",;{", is_bare=form.is_bare)
        self._form = form
        self._heads = Marks(*form.heads, "{") if form.heads else None
        self._object = CallObject()
        self._value = JsonValue("{")
        self._head = ""
        self._is_called = False  # whether the call that is read was announced

    def _meet(self, mark: str) -> bool:
        if mark in self._form.around:
            self._prose.at_mark()
            self._expects_calls = True
            return True
        return super()._meet(mark)

    def _begun(self) -> bool:
        """Read what follows a mark, or a comma: an object, the beginning of a list, or a name."""
        if not self._skip_blanks():
            return self._refuse() if self._over else False
        sign = self._text[0]
        if sign == "[" and not self._is_list:
            self._take(1)
            self._is_list = True
            return True
        self._is_called = False
        if sign == "{":
            self._object = CallObject()
            self._state = JsonCalls._in_object
        elif self._heads is None or self._is_list:
            return self._refuse()
        else:
            self._head = ""
            self._state = JsonCalls._in_head
        return True

    def _in_object(self) -> bool:
        read = self._object
        self._take(read.read(self._text))
        if self._over and not read.is_over:
            read.end()
        if read.name and read.has_arguments and not self._is_called:
            self._call_by(read.name)
        if self._is_called:
            self._argue(read.take_arguments())
        if not (read.is_over or self._over):
            return False
        if not self._is_called:
            is_whole = read.is_over and not read.is_broken and not read.aside
            if not read.name or not is_whole or self._form.is_bare:
                return self._refuse()
            self._call_by(read.name)
            self._argue("{}")
        self._state = JsonCalls._after
        if read.is_over or not self._is_cut:
            self._say(read.aside)
        return True

    def _is_begun_call(self) -> bool:
        return super()._is_begun_call() or (
            self._state is JsonCalls._in_object and self._object.describes_call
        )

    def _call_by(self, name: str) -> None:
        self._announce(name)
        self._is_called = self._is_inside = True

    def _in_head(self) -> bool:
        assert self._heads is not None
        before, mark, _ = self._heads.split(self._text)
        room = MAX_HEAD - len(self._head)
        if len(before) > room:
            self._take(room + 1)
            return self._refuse()
        self._head += self._take(len(before))
        if not mark:
            return self._refuse() if self._over else False
        name = self._form.name_of(self._head)
        if not name or len(name) > MAX_NAME or any(character.isspace() for character in name):
            return self._refuse()
        if mark != "{":
            self._take(len(mark))
        self._call_by(name)
        self._state = JsonCalls._before_arguments
        return True

    def _before_arguments(self) -> bool:
        if not self._skip_blanks():
            if self._over:
                self._state = JsonCalls._after
            return self._over
        if self._text[0] == "{":
            self._value = JsonValue("{")
            self._state = JsonCalls._in_arguments
            return True
        end = self._ends.at_start(self._text)
        if end == "" and not self._over:
            return False
        if end:
            self._argue("{}")
        self._state = JsonCalls._after
        return True

    def _in_arguments(self) -> bool:
        self._argue(self._take(self._value.read(self._text)))
        return self._end_once(self._value.is_over)
