"""Tool calls with a tag per value, named by its key: objects and lists are nested tags, each after a special token.

]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>text]<]minimax[>[</a>]<]minimax[>[<b>]<]minimax[>[<item>1…
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.json_scan import quoted
from quintet.detokenizer_proc.parsers.machine import CallReader
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.schemas import Schemas, json_of

MAX_DEPTH = 32
"""Nested tags of a value; deeper ones are text."""
_TAG = re.compile(
    r'\s{0,16}<(/?)([^<>\s/"=]{1,256})(?:\s{1,16}name\s?=\s?["\']([^"\'<>]{1,256})["\'])?\s{0,16}>'
)
_PART_OF_TAG = re.compile(rf"\s{{0,16}}(?:</?[^<>]{{0,{2 * MAX_NAME}}})?")
_GROUP, _CALL, _ITEM = "tool_call", "invoke", "item"
_TEXT = "$text"
"""Key of text beside nested tags."""


@dataclass(frozen=True, slots=True)
class NestedFormat:
    """Syntax of a model's calls."""

    mark: str
    """Special token before each tag."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        names = (_GROUP, _CALL, _ITEM)
        return frozenset({self.mark, *(f"<{name}>" for name in names), *(f"</{name}>" for name in names)})


@dataclass(slots=True)
class _Node:
    """A tag of a value that is not closed yet."""

    key: str
    text: list[str] = field(default_factory=list)
    children: list[tuple[str, str]] = field(default_factory=list)
    """Keys and values, as JSON."""


class NestedCalls(CallReader):
    """Parses calls of a `NestedFormat`."""

    def __init__(self, form: NestedFormat, schemas: Schemas) -> None:
        super().__init__(Marks(form.mark))
        self._schemas = schemas
        self._mark = form.mark
        self._name = ""
        self._open: list[_Node] = []
        """The value's tag, and the open tags inside it."""
        self._is_text = False  # the value is streamed
        self._is_at_mark = False  # a mark precedes the text between two values
        self._value_ends = Marks(form.mark)

    def _is_partial_call(self) -> bool:
        return bool(self._raw)

    def _skip_marks(self) -> bool | None:
        """Consume whitespace and marks; return whether other text remains, or None if it may be part of a mark."""
        while self._skip_blanks():
            found = self._begins.at_start(self._text)
            if found == "":
                return self._over or None
            if not found:
                return True
            self._take(len(found))
            self._is_at_mark = True
        return False

    def _is_part_of_tag(self) -> bool:
        return not self._over and _PART_OF_TAG.fullmatch(self._text) is not None

    def _read_start(self) -> bool:
        """Read the tag of a group or of a call."""
        has_text = self._skip_marks()
        if not has_text:
            return has_text is False and self._over and self._reject()
        tag = _TAG.match(self._text)
        if tag is None:
            return False if self._is_part_of_tag() else self._reject()
        is_end, tag_name, name = tag.groups()
        if tag_name not in {_GROUP, _CALL} or (tag_name == _CALL and not (name or is_end)):
            return self._reject()
        if tag_name == _CALL and not is_end and any(sign.isspace() for sign in name):
            return self._reject()
        self._take(tag.end())
        if is_end:
            self._prose.at_mark()
            return self._return()
        if tag_name == _CALL:
            self._name = name
            self._start_call(name)
            self._is_at_mark = False
            self._state = NestedCalls._before_values
        return True

    def _before_values(self) -> bool:
        """Read all arguments as one JSON object, or the first tag."""
        has_text = self._skip_marks()
        if has_text is None or (not has_text and not self._over):
            return False
        if has_text and self._text[0] == "{":
            return self._begin_object()
        self._emit_arguments("{")
        self._state = NestedCalls._in_call
        return True

    def _in_call(self) -> bool:
        """Read the tag of a value, or the end of the call."""
        has_text = self._skip_marks()
        if has_text is None or (not has_text and not self._over):
            return False
        tag = _TAG.match(self._text)
        if tag is None and self._is_part_of_tag():
            return False
        if tag is None and has_text and self._is_at_mark and self._text[0] != "<":
            self._begin_value("")  # some checkpoints omit a value's first tag; its last one has the key
            return True
        if tag is None and self._is_cut:
            return self._drop()
        if tag is None or tag[1] or tag[2] in {_GROUP, _CALL}:
            if has_text or not self._is_cut:
                self._emit_arguments("}")
            if tag is not None and tag[1]:
                self._take(tag.end())
            self._state = NestedCalls._after
            return True
        self._take(tag.end())
        self._begin_value(tag[2])
        return True

    def _begin_value(self, key: str) -> None:
        """Begin a value. An empty key is not known before the value's end."""
        self._open = [_Node(key)]
        self._is_text = bool(key) and self._schemas.types(self._name, key) == {"string"}
        if self._is_text:
            self._emit_arguments(self._next_key(key) + '"')
        self._set_value_ends()
        self._state = NestedCalls._in_value

    def _after(self) -> bool:
        """Read another call of the group, or content, after a call."""
        if not self._skip_blanks():
            return self._over and self._return()
        found = self._begins.at_start(self._text)
        if found == "" and not self._over:
            return False
        if found == "" and self._is_cut:
            return self._drop()
        if not found and _TAG.match(self._text) is None:
            return False if self._is_part_of_tag() else self._return()
        self._attempt("")
        self._state = NestedCalls._read_start
        return True

    def _set_value_ends(self) -> None:
        key = self._open[-1].key
        self._value_ends = Marks(self._mark, *((f"</{key}>",) if key else ()))

    def _in_value(self) -> bool:
        before, end, rest = self._value_ends.split(self._text)
        if self._over and not end:
            before, rest = before + ("" if self._is_cut else rest), ""
        self._add_text(before)
        self._text = end + rest
        if not end:
            if self._over:
                self._end_output()
            return self._over
        if end != self._mark:
            is_end = self._is_end_without_mark(len(end))
            if is_end is None:
                return False
            self._text = rest
            if is_end:
                self._close(len(self._open) - 1)
            else:
                self._add_text(end)
            return True
        tag = _TAG.match(rest)
        if tag is None and not self._over and _PART_OF_TAG.fullmatch(rest):
            return False
        self._text = rest
        if tag is not None:
            self._read_tag(tag)
        return True

    def _is_end_without_mark(self, num_chars: int) -> bool | None:
        """Return whether a closing tag without a mark ends the value: another tag with a mark follows."""
        end, following = self._text[:num_chars], self._text[num_chars:].lstrip()
        if not following.startswith(self._mark):
            is_open = self._mark.startswith(following) and not self._over
            return None if is_open else self._over and not following
        after = following[len(self._mark) :].lstrip()
        return (
            None if end.startswith(after) and after != end and not self._over else not after.startswith(end)
        )

    def _read_tag(self, tag: re.Match[str]) -> None:
        """Read a tag after a mark within a value."""
        is_end, key, _ = tag.groups()
        keys = [node.key for node in self._open]
        if key in {_GROUP, _CALL} and not (is_end and key in keys):
            self._close(0)
            return
        self._text = self._text[tag.end() :]
        if is_end and key in keys:
            self._close(len(keys) - 1 - keys[::-1].index(key))
        elif is_end and keys == [""]:
            self._open[0].key = key
            self._close(0)
        elif is_end and not self._is_text and self._open[-1].text:
            node = _Node(key, self._open[-1].text)
            self._open[-1].text = []
            self._open.append(node)
            self._close(len(self._open) - 1)
        elif self._is_text or is_end or len(keys) >= MAX_DEPTH or keys == [""]:
            self._add_text(tag[0])
        else:
            self._open.append(_Node(key))
            self._set_value_ends()

    def _add_text(self, text: str) -> None:
        if self._is_text:
            self._emit_arguments(quoted(text)[1:-1])
        elif text:
            self._open[-1].text.append(text)

    def _end_output(self) -> None:
        """End the value, and the call, at the end of the output. A limit leaves both open."""
        if not self._is_cut:
            self._close(0)
            self._emit_arguments("}")
        self._return()

    def _close(self, depth: int) -> None:
        """Close the open tags down to one at a depth."""
        while len(self._open) > max(depth, 1):
            value = self._value()
            node = self._open.pop()
            self._open[-1].children.append((node.key, value or '""'))
        if depth > 0:
            self._set_value_ends()
            return
        self._is_at_mark = False
        if self._is_text:
            self._emit_arguments('"')
        elif not self._open[0].key:
            self._emit_prose("".join(self._open[0].text))
        elif value := self._value():
            self._emit_arguments(self._next_key(self._open[0].key) + value)
        self._state = NestedCalls._in_call

    def _value(self) -> str:
        """Return the innermost open value as JSON; empty if it has no text and may not be a string."""
        node = self._open[-1]
        text = "".join(node.text)
        types = self._schemas.types_at(self._name, [each.key for each in self._open])
        if not node.children:
            if not text.strip() and types and "string" not in types:
                return "[]" if "array" in types else "{}" if "object" in types else ""
            return json_of(text, types)
        if text.strip():
            node.children.append((_TEXT, quoted(text.strip())))
        is_list = "array" in types or (
            "object" not in types and all(key == _ITEM for key, _ in node.children)
        )
        if is_list:
            return "[" + ", ".join(value for _, value in node.children) + "]"
        values: dict[str, list[str]] = {}
        for key, value in node.children:
            values.setdefault(key, []).append(value)
        written = (
            (key, value[0] if len(value) == 1 else f"[{', '.join(value)}]") for key, value in values.items()
        )
        return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in written) + "}"
