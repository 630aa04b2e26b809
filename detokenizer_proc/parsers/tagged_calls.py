"""Tool calls as tags: a function's tag with one or two tags per parameter, and untyped text between them.

Types come from the tools' schemas (`quintet.detokenizer_proc.parsers.schemas`). Strings are streamed; other values are
emitted when their tag ends.
"""

from __future__ import annotations

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.json_scan import quoted
from quintet.detokenizer_proc.parsers.machine import CallReader
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.schemas import Schemas, Types, fields_of, json_of
from quintet.detokenizer_proc.parsers.tag_format import TagFormat

MAX_ENDS = 4
"""End marks after a value that are searched for the end of a call."""
MAX_BLANKS = 64
"""Whitespace between two end marks."""
MAX_MARK = 64
"""Characters of the longest mark."""
_WRAPPERS = frozenset({"arguments", "input"})
"""Parameters with all arguments as one object, if the function has no such parameter."""
_WITHOUT_TEXT = frozenset({"integer", "number", "boolean", "null"})
"""Types with values that contain no marks."""


class TaggedCalls(CallReader):
    """Parses calls of a `TagFormat`."""

    def __init__(self, form: TagFormat, schemas: Schemas) -> None:
        function = (form.function,) if form.function else ()
        super().__init__(Marks(*form.begins, *form.around, *(function if form.can_omit_begin else ())))
        self._form = form
        self._schemas = schemas
        self._fillers = Marks(*form.fillers)
        line_end = ("\n",) if form.has_lines else ()  # follows a name or a key that lacks its end
        no_end = ("\n", form.parameter, form.key_end, form.value_end, *form.begins, *form.fillers, *form.ends)
        self._name_ends = Marks(*((form.name_end, *line_end) if form.name_end else no_end))
        self._key_ends = Marks(form.key_end, *line_end, *(form.value_begin and (form.value_begin,)))
        self._plain_ends = self._value_ends = Marks(form.value_end, form.parameter, *form.ends)
        self._quote_ends = Marks(*form.quotes[1:])
        self._value_end = form.value_end  # of the current value
        self._inside = Marks(form.parameter, form.value_end, *form.ends, *function)
        self._follows = Marks(*form.begins, *form.ends, *function)
        self._leads = Marks(*(form.quotes[:1] or (form.value_begin and (form.value_begin, form.key_end))))
        self._after_value = Marks(form.parameter, *self._follows.marks, *(form.quotes and (form.value_end,)))
        self._name = ""
        self._key = ""  # of the current value
        self._held = ""  # partial name or key
        self._value: list[str] = []
        self._blank = ""  # a newline that belongs to the end tag if the tag follows
        self._begins_value = False
        self._has_tag = False  # the value has the opening of its own end tag
        self._tail = ""  # last characters of the value
        self._has_value_lines = False  # the value began on a line of its own
        self._is_at_line = True  # the value's next character begins a line
        self._types: Types = frozenset()
        self._is_text = False  # the value is streamed
        self._is_wrapper = False  # the value may be all arguments

    def _on_mark(self, mark: str) -> bool:
        if mark in self._form.around:
            self._prose.at_mark()
            self._expects_calls = True
            return False
        self._attempt(mark)
        self._held = ""
        is_function = mark == self._form.function or not self._form.function
        self._state = TaggedCalls._in_name if is_function else TaggedCalls._read_start
        return True

    def _is_partial_call(self) -> bool:
        return bool(self._raw)

    def _read_start(self) -> bool:
        """Read a function's tag after the mark around calls."""
        if not self._skip_blanks():
            return self._reject() if self._over else False
        filler = self._fillers.at_start(self._text)
        if filler:
            self._take(len(filler))
            return True
        function = self._form.function
        if self._text.startswith(function):
            self._take(len(function))
            self._state = TaggedCalls._in_name
            return True
        may_follow = filler == "" or function.startswith(self._text)
        return False if may_follow and not self._over else self._reject()

    def _in_name(self) -> bool:
        before, mark, _ = self._name_ends.split(self._text)
        num_free = MAX_NAME - len(self._held)
        if len(before) > num_free:
            self._take(num_free + 1)
            return self._reject()
        self._held += self._take(len(before))
        if not mark:
            return self._reject() if self._over else False
        if mark == "\n" and not self._held.strip():  # a newline before the name
            self._held += self._take(1)
            return True
        held = self._held.strip()
        if mark == self._form.key_end != self._form.name_end and (key := self._schemas.key_after_name(held)):
            held = held.removesuffix(key)  # the model omitted the mark before the first key
            self._text = self._form.parameter + key + self._text
        name = self._form.name_of(held)
        if not name or any(sign.isspace() or sign in '<>{}"' for sign in name):
            return self._reject()
        if mark in {self._form.name_end, "\n"}:
            self._take(len(mark))
        self._name = name
        self._state = TaggedCalls._after_name
        return True

    def _after_name(self) -> bool:
        """Accept the call if its name is followed by arguments, an end mark, another call or the end of the output."""
        if not self._skip_blanks():
            if self._over and not self._is_cut:  # the model omitted the end mark
                self._begin_call()
                self._emit_arguments("}")
                return self._return()
            return self._over and self._reject()
        if self._text[0] == "{":
            self._start_call(self._name)
            return self._begin_object()
        filler = self._fillers.at_start(self._text)
        if filler:
            self._take(len(filler))
            return True
        if filler == "" and not self._over:
            return False
        mark = self._inside.at_start(self._text)
        if mark is None:
            mark = self._after_value.at_start(self._text)
        if mark == "" and not self._over:
            return False
        if mark is None or (mark == "" and self._is_cut):
            return self._reject()
        # A model may write the mark before a call in place of the mark before its first key.
        if mark in self._form.begins and not self._form.function:
            rest = self._text[len(mark) :]
            key, end = self._key_in(rest)
            if end == "" and not self._over:
                return False
            if end and self._schemas.key_after_name(f"{self._name} {key}"):
                self._text = self._form.parameter + rest
        self._begin_call()
        self._state = TaggedCalls._in_call
        return True

    def _key_in(self, text: str) -> tuple[str, str | None]:
        """Return the text before the next mark, and the mark if it follows a key: empty if it may, None otherwise."""
        key, sign, _ = text[:MAX_NAME].partition("<")
        if not sign:
            return key.strip(), "" if len(text) < MAX_NAME else None
        return key.strip(), Marks(self._form.key_end).at_start(text[len(key) : len(key) + MAX_MARK])

    def _begin_call(self) -> None:
        self._start_call(self._name)
        self._emit_arguments("{")

    def _in_call(self) -> bool:
        """Read a parameter, the end of the call, or content."""
        if not self._skip_blanks():
            if self._over and not self._is_cut:  # the model omitted the end mark
                self._emit_arguments("}")
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
        if mark and mark == self._form.value_end:  # without a value
            self._take(len(mark))
            return True
        self._emit_arguments("}")
        if mark and mark in self._form.ends:
            self._take(len(mark))
        self._state = TaggedCalls._after
        return True

    def _after(self) -> bool:
        """Read another call of the same group, another mark, or content, after a call."""
        if not self._skip_blanks():
            return self._over and self._return()
        mark = self._inside.at_start(self._text)
        if mark == "" and not self._over:
            return False
        if mark == "" and self._is_cut:
            return self._drop()
        if mark and mark in {*self._form.ends, self._form.value_end}:
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
        num_free = MAX_NAME - len(self._held)
        self._held += self._take(min(len(before), num_free + 1))
        if not mark and not self._over and len(self._held) <= MAX_NAME:
            return False
        if mark == "\n" and not self._held.strip():  # a newline before the key
            self._held += self._take(1)
            return True
        if mark and mark not in {"\n", self._form.value_begin} and len(self._held) <= MAX_NAME:
            self._take(len(mark))
        key = self._held.strip().removeprefix(self._form.parameter)
        key, kind = self._form.key_of(key)
        self._key = key
        self._types = self._schemas.types(self._name, key)
        if kind:
            self._types = frozenset({kind}) if kind == "string" else self._types - {"string"}
        self._is_wrapper = key in _WRAPPERS and self._num_values == 0 and self._schemas.lack(self._name, key)
        self._is_text = self._types == {"string"} and not self._is_wrapper
        if self._is_text:
            self._emit_arguments(self._next_key(key) + '"')
        self._value, self._blank, self._begins_value = [], "", True
        self._has_tag, self._tail = False, ""
        self._has_value_lines, self._is_at_line = False, True
        self._value_end, self._value_ends = self._form.value_end, self._plain_ends
        self._state = TaggedCalls._before_value if self._leads.marks else TaggedCalls._in_value
        return True

    def _before_value(self) -> bool:
        """Skip the optional mark before a value, and a repeated mark after its key."""
        if not self._form.quotes:
            self._skip_blanks()
        text = self._text.lstrip()
        num_blanks = len(self._text) - len(text)
        mark = self._leads.at_start(text)
        if mark == "" and num_blanks < MAX_BLANKS and not self._over:
            return False
        if mark:
            self._take(num_blanks + len(mark))
            if self._form.quotes:
                self._value_end, self._value_ends = self._form.quotes[1], self._quote_ends
        if mark != self._form.key_end:
            self._state = TaggedCalls._in_value
        return True

    def _in_value(self) -> bool:
        before, mark, rest = self._value_ends.split(self._text)
        if self._is_cut and not mark:  # drop a possible partial tag
            self._text = before
        elif self._over and not mark:
            before += rest
        self._add_to_value(self._take(len(before)))
        if mark and self._can_have_text:
            is_end = self._is_value_end(mark)
            if is_end is None:
                return False
            if not is_end:
                self._add_to_value(self._take(len(mark)))
                return True
        if not (mark or self._over):
            return False
        if not mark:  # truncated
            self._emit_value(self._blank)
        if not self._is_text:
            self._emit_typed("".join(self._value))
        elif mark or not self._is_cut:
            self._emit_arguments('"')
        if mark == self._value_end:
            self._take(len(mark))
        if mark:
            self._state = TaggedCalls._in_call
            return True
        if not self._is_cut:  # the model omitted the end marks
            self._emit_arguments("}")
        return self._return()

    def _emit_typed(self, text: str) -> None:
        """Emit a value that is not streamed. An empty text is no value of a type other than string."""
        if self._is_wrapper and (fields := fields_of(text)) is not None:
            self._num_values += bool(fields)
            self._emit_arguments(fields)
        elif text.strip() or not self._types or "string" in self._types:
            self._emit_arguments(self._next_key(self._key) + json_of(text, self._types))

    @property
    def _can_have_text(self) -> bool:
        """True if the value's types allow marks as text."""
        return not self._types or not self._types <= _WITHOUT_TEXT

    def _is_value_end(self, mark: str) -> bool | None:
        """Return whether a mark at the start of the text ends the value; None until more text decides."""
        if mark == self._value_end:
            return self._is_followed_by_mark(len(mark))
        if self._has_value_lines and not self._is_at_line:
            return False
        return True if mark == self._form.parameter else self._is_call_end()

    def _is_followed_by_mark(self, num_chars: int) -> bool | None:
        """Return whether a mark or the end of the output follows an end tag. If not, the tag is text of the value."""
        rest = self._text[num_chars : num_chars + MAX_BLANKS + MAX_MARK]
        following = rest.lstrip()
        if len(rest) - len(following) >= MAX_BLANKS:
            return True
        if following and not self._has_tag and self._value_end.startswith(following[: len(self._value_end)]):
            # The model may have doubled the tag.
            return True if following.startswith(self._value_end) else (self._over or None)
        mark = self._after_value.at_start(following)
        return (self._over or None) if mark == "" else mark is not None

    def _is_call_end(self) -> bool | None:
        """Return whether only end marks, and then a line's end, another call or the end of the output follow.

        At the start of a line all marks of a call's end suffice. Otherwise the marks are text of the value. Returns None
        until more text decides.
        """
        at, is_group_end = 0, False
        for num_ends in range(MAX_ENDS):
            mark = self._follows.at_start(self._text[at : at + MAX_MARK])
            if mark == "":
                return self._over or None
            if mark not in self._form.ends:
                return mark is not None
            is_group_end = is_group_end or mark in (self._form.ends[1:] or self._form.ends)
            if is_group_end and num_ends > 0 and self._is_at_line:
                return True
            at += len(mark)
            rest = self._text[at : at + MAX_BLANKS]
            num_blanks = len(rest) - len(rest.lstrip())
            if ((is_group_end or self._is_at_line) and "\n" in rest[:num_blanks]) or num_blanks == MAX_BLANKS:
                return True
            at += num_blanks
            if at == len(self._text):
                return self._over or None
        return True

    def _add_to_value(self, text: str) -> None:
        if text:
            self._is_at_line = text.endswith("\n")
            tag = self._value_end.replace("</", "<").removesuffix(">")
            self._has_tag = self._has_tag or tag in self._tail + text
            self._tail = (self._tail + text)[-MAX_MARK:]
        if not self._form.has_lines:
            self._emit_value(text)
            return
        if text and self._begins_value:
            self._begins_value = False
            self._has_value_lines = text.startswith("\n")
            text = text.removeprefix("\n")
        text = self._blank + text
        kept = text.removesuffix("\n")
        self._blank = text[len(kept) :]
        self._emit_value(kept)

    def _emit_value(self, text: str) -> None:
        if self._is_text:
            self._emit_arguments(quoted(text)[1:-1])
        else:
            self._value.append(text)
