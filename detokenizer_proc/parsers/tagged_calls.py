"""Calls as tags: a function's, and in it one or two for each parameter. What is between them is text of no type.

The types are the tools' own (`quintet.detokenizer_proc.parsers.schemas`). Strings are told as they come, everything else
when its tag ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.json_scan import quoted
from quintet.detokenizer_proc.parsers.machine import MAX_NAME, CallReader
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.schemas import Schemas, Types, json_of


@dataclass(frozen=True, slots=True)
class TagFormat:
    """How a model writes calls."""

    begins: tuple[str, ...]
    """Around a call or several."""
    function: str
    """Before a name; empty when it follows ``begins`` at once."""
    name_end: str
    """After a name; empty when the first parameter or the end follows at once."""
    parameter: str
    key_end: str
    value_end: str
    ends: tuple[str, ...]
    """What ends a call. Also ends a value whose own end was forgotten."""
    value_begin: str = ""
    """What stands before a value, after blanks."""
    has_lines: bool = False
    """Whether a value stands in lines of its own."""
    can_omit_begin: bool = False
    """Whether a call may begin with its function's tag."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that must be seen."""
        parts = (self.function, self.name_end, self.parameter, self.key_end, self.value_begin, self.value_end)
        return frozenset({*self.begins, *self.ends, *parts} - {""})


class TaggedCalls(CallReader):
    """Reads calls of a `TagFormat`."""

    def __init__(self, form: TagFormat, schemas: Schemas) -> None:
        alone = (form.function,) if form.can_omit_begin else ()
        super().__init__(Marks(*form.begins, *alone))
        self._form = form
        self._schemas = schemas
        self._name_ends = Marks(form.name_end) if form.name_end else Marks("\n", form.parameter, *form.ends)
        self._key_ends = Marks(form.key_end)
        self._value_ends = Marks(form.value_end, form.parameter, *form.ends)
        self._inside = Marks(form.parameter, *form.ends, *((form.function,) if form.function else ()))
        self._name = ""
        self._num_values = 0
        self._held = ""  # of a name or key
        self._value: list[str] = []
        self._blank = ""  # a line's end that is the tag's when the tag follows
        self._begins_value = False
        self._types: Types = frozenset()
        self._is_text = False  # whether the value is told as it comes

    def _meet(self, mark: str) -> bool:
        self._attempt(mark)
        self._held = ""
        is_function = mark == self._form.function or not self._form.function
        self._state = TaggedCalls._in_name if is_function else TaggedCalls._begun
        return True

    def _is_begun_call(self) -> bool:
        return bool(self._raw)

    def _begun(self) -> bool:
        """Read what follows the mark around calls: a function's tag."""
        if not self._skip_blanks():
            return self._refuse() if self._over else False
        function = self._form.function
        if self._text.startswith(function):
            self._take(len(function))
            self._held = ""
            self._state = TaggedCalls._in_name
            return True
        return False if function.startswith(self._text) and not self._over else self._refuse()

    def _in_name(self) -> bool:
        before, mark, _ = self._name_ends.split(self._text)
        room = MAX_NAME - len(self._held)
        if len(before) > room:
            self._take(room + 1)
            return self._refuse()
        self._held += self._take(len(before))
        if not mark:
            return self._refuse() if self._over else False
        if mark == "\n" and not self._held.strip():  # a line's end before the name
            self._held += self._take(1)
            return True
        name = self._held.strip()
        if not name or any(sign.isspace() or sign in '<>{}"' for sign in name):
            return self._refuse()
        if mark in {self._form.name_end, "\n"}:
            self._take(len(mark))
        self._name = name
        self._announce(name)
        self._argue("{")
        self._num_values = 0
        self._state = TaggedCalls._in_call
        return True

    def _in_call(self) -> bool:
        """Read what follows a function's name or a parameter: a parameter, the end of the call, or content."""
        if not self._skip_blanks():
            return self._over and self._return()
        mark = self._inside.at_start(self._text)
        if mark == "" and not self._over:
            return False
        if mark == "" and self._is_cut:
            return self._drop()
        if mark == self._form.parameter:
            self._take(len(mark))
            self._held = ""
            self._state = TaggedCalls._in_key
            return True
        self._argue("}")
        if mark and mark in self._form.ends:
            self._take(len(mark))
        self._state = TaggedCalls._after
        return True

    def _after(self) -> bool:
        """Read what follows a call: another of the same group, another mark, or content."""
        if not self._skip_blanks():
            return self._over and self._return()
        mark = self._inside.at_start(self._text)
        if mark == "" and not self._over:
            return False
        if mark == "" and self._is_cut:
            return self._drop()
        if mark and mark in self._form.ends:
            self._take(len(mark))
            return True
        if mark and mark == self._form.function:
            self._attempt("")
            self._take(len(mark))
            self._held = ""
            self._state = TaggedCalls._in_name
            return True
        return self._return()

    def _in_key(self) -> bool:
        before, mark, rest = self._key_ends.split(self._text)
        if self._is_cut and not mark:
            return self._drop()
        if self._over and not mark:
            before += rest
        room = MAX_NAME - len(self._held)
        self._held += self._take(min(len(before), room + 1))
        if not mark and not self._over and len(self._held) <= MAX_NAME:
            return False
        if mark and len(self._held) <= MAX_NAME:
            self._take(len(mark))
        key = self._held.strip()
        self._argue(("" if self._num_values == 0 else ", ") + quoted(key) + ": ")
        self._num_values += 1
        self._types = self._schemas.types(self._name, key)
        self._is_text = self._types == {"string"}
        if self._is_text:
            self._argue('"')
        self._value, self._blank, self._begins_value = [], "", True
        self._state = TaggedCalls._before_value if self._form.value_begin else TaggedCalls._in_value
        return True

    def _before_value(self) -> bool:
        """Skip the tag before a value; a value without it is one all the same."""
        if not self._skip_blanks() and not self._over:
            return False
        begin = self._form.value_begin
        if begin.startswith(self._text) and self._text != begin and not self._over:
            return False
        if self._text.startswith(begin):
            self._take(len(begin))
        self._state = TaggedCalls._in_value
        return True

    def _in_value(self) -> bool:
        before, mark, rest = self._value_ends.split(self._text)
        if self._is_cut and not mark:  # what may begin a tag is no part of the value
            self._text = before
        elif self._over and not mark:
            before += rest
        self._add_to_value(self._take(len(before)))
        if not (mark or self._over):
            return False
        if not mark:  # it was cut off
            self._tell_value(self._blank)
        if not self._is_text:
            self._argue(json_of("".join(self._value), self._types))
        elif mark:
            self._argue('"')
        if mark == self._form.value_end:
            self._take(len(mark))
        if mark:
            self._state = TaggedCalls._in_call
            return True
        return self._return()

    def _add_to_value(self, text: str) -> None:
        if not self._form.has_lines:
            self._tell_value(text)
            return
        if text and self._begins_value:
            self._begins_value = False
            text = text.removeprefix("\n")
        text = self._blank + text
        kept = text.removesuffix("\n")
        self._blank = text[len(kept) :]
        self._tell_value(kept)

    def _tell_value(self, text: str) -> None:
        if self._is_text:
            self._argue(quoted(text)[1:-1])
        else:
            self._value.append(text)
