"""Streaming JSON scanner: finds the end of a value, and the name and arguments in an object that describes a call.

Models write JSON with errors, so values are not validated; arguments are repaired (`json_repair`). A value ends with its
brackets or quotes, or at a ``<``: it begins a mark, and JSON allows it only in strings.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from quintet.detokenizer_proc.parsers.interface import MAX_NAME
from quintet.detokenizer_proc.parsers.json_repair import CLOSERS, JsonRepair, close_brackets

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,;}\]<]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_NOT_BLANK = re.compile(r"\S")


def unquoted(text: str) -> str:
    """Decode a JSON string; for an invalid one, return the text between its quotes."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        found = None
    if not isinstance(found, str):
        found = text.strip().removeprefix('"').removesuffix('"')
    return encodable(found)


def encodable(text: str) -> str:
    """Replace lone surrogates, which escapes can produce and UTF-8 cannot encode."""
    return _SURROGATES.sub("\ufffd", text)


def quoted(text: str) -> str:
    """Encode a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class JsonValue:
    """Finds the end of one value. ``first`` is its first character."""

    __slots__ = ("_closers", "_escaped", "_in_string", "_is_nested", "is_over", "is_string")

    def __init__(self, first: str) -> None:
        self.is_string = first == '"'
        self._is_nested = first in {"{", "["}
        self._closers: list[str] = []  # of the open brackets
        self._in_string = False
        self._escaped = False
        self.is_over = False

    @property
    def is_scalar(self) -> bool:
        """True for a number or a literal name."""
        return not (self.is_string or self._is_nested)

    def read(self, text: str) -> int:
        """Read text; return the number of characters of the value. Sets `is_over` at its end."""
        if self.is_scalar:
            end = _SCALAR_END.search(text)
            self.is_over = end is not None
            return len(text) if end is None else end.start()
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text)
            at = match.end()
            character = match[0]
            if character == "\\":
                self._escaped = at == len(text)
                at += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif character == "<":
                self.is_over = True
                return match.start()
            elif character in CLOSERS:
                self._closers.append(CLOSERS[character])
            else:
                close_brackets(self._closers, character)
            if not (self._in_string or self._closers):
                self.is_over = True
                return at


class _Expects(Enum):
    OPENING = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_TEXT = auto()
    COMMA = auto()


NAME_KEYS = frozenset({"name", "function", "tool_name", "tool"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args", "input"})
UNMARKED_KEYS = frozenset({"name", "function", "tool_name", "arguments", "parameters"})
"""Keys of a call without a mark; others are too common in other JSON."""
ALIASES = (NAME_KEYS | ARGUMENT_KEYS) - UNMARKED_KEYS
"""Keys that are part of a call only if it lacks the usual key."""
OTHER_KEYS = frozenset({"id", "index", "tool_call_id", "type"})


class CallObject:
    """An object that describes a call: name and arguments under two keys, in any order.

    OpenAI's ``{"function": {…}}`` around it is skipped.
    """

    def __init__(
        self,
        *,
        is_marked: bool = True,
        is_strict: bool = False,
        is_keyed: bool = False,
        argument_key: str = "",
    ) -> None:
        """``is_marked``: a mark precedes the object, so it may have other keys than `UNMARKED_KEYS`.

        ``is_strict``: the arguments are an object, or text of one, under the key ``arguments``; no unknown key precedes them.
        ``is_keyed``: the first key is the name, and its value the arguments. ``argument_key``: one of `ALIASES` that is
        the format's own key.
        """
        self.name: str | None = None
        self.has_arguments = False
        """True once the arguments have begun."""
        self.is_over = False
        self.is_broken = False
        """True if the object cannot describe a call; then `is_over` is set too."""
        self._name_keys = NAME_KEYS if is_marked else NAME_KEYS & UNMARKED_KEYS
        self._argument_keys = ARGUMENT_KEYS if is_marked else ARGUMENT_KEYS & UNMARKED_KEYS
        self._aliases = ALIASES - {argument_key}
        self._is_strict = is_strict
        self._is_keyed = is_keyed
        if is_strict:
            self._argument_keys = frozenset({"arguments"})
        self._known_keys = self._name_keys | self._argument_keys | OTHER_KEYS
        self._expects = _Expects.OPENING
        self._depth = 0
        self._value = JsonValue('"')
        self._parts: list[str] = []  # of the current key or value
        self._num_held = 0
        self._key = ""
        self._is_extra = False  # the current key is not part of a call
        self._has_alias = False  # `ALIASES` gave the name or the arguments
        self._fresh: list[str] = []
        self._repair = JsonRepair()
        self._is_ended = self._is_cut = False
        self._extra: list[str] = []

    @property
    def describes_call(self) -> bool:
        """True if the object so far has a name and the key of the arguments."""
        return self.name is not None and self._is_argument

    @property
    def extra(self) -> str:
        """Text of keys and values that are not part of a call."""
        return "".join(self._extra)

    def take_arguments(self) -> str:
        """Return and clear the new text of the arguments."""
        fresh, self._fresh = self._fresh, []
        text = self._repair.take("".join(fresh))
        return text + self._repair.end(is_cut=self._is_cut) if self.is_over or self._is_ended else text

    @property
    def _is_argument(self) -> bool:
        return self._key in self._argument_keys and not self._is_extra

    @property
    def _is_name(self) -> bool:
        return self._key in self._name_keys and not self._is_extra

    def read(self, text: str) -> int:
        """Read text; return the number of characters of the object."""
        at = 0
        while at < len(text) and not self.is_over:
            if self._expects in {_Expects.KEY_TEXT, _Expects.VALUE_TEXT}:
                at = self._read_text(text, at)
            else:
                match = _NOT_BLANK.search(text, at)
                if match is None:
                    return len(text)
                at = self._read_sign(match[0], match.start())
        return at

    def end(self, *, is_cut: bool) -> None:
        """End the text and release the held arguments. ``is_cut``: a limit ended the text, not the model."""
        self._is_ended, self._is_cut = True, is_cut
        if self._expects is _Expects.VALUE_TEXT and self._is_argument:
            self._end_arguments()

    def _read_sign(self, sign: str, at: int) -> int:
        """Read a structural character; return the next position."""
        match self._expects:
            case _Expects.OPENING if sign == "{":
                self._expects, self._depth = _Expects.KEY, self._depth + 1
            case _Expects.KEY | _Expects.COMMA if sign == "}":
                self._depth -= 1
                self._expects = _Expects.COMMA
                self.is_over = self._depth == 0
            case _Expects.KEY if sign == "{" and self._depth == 1 and not self._key:
                self._depth += 1  # a doubled brace, as prompt templates with escapes write it
            case _Expects.KEY if sign == '"':
                self._begin(_Expects.KEY_TEXT, sign)
                return at
            case _Expects.COLON if sign == ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA if sign == ",":
                self._expects = _Expects.KEY
            case _Expects.VALUE if sign == "{" and self._key == "function":
                self._expects, self._depth = _Expects.KEY, self._depth + 1
            case _Expects.VALUE if sign not in ",:}]<" and (sign == '"' or not self._is_name):
                is_text = self._is_strict and sign == '"'
                if (
                    self._is_argument
                    and (self._is_strict or self._key in self._aliases)
                    and not (sign == "{" or is_text)
                ):
                    self._begin_extra()
                self._begin(_Expects.VALUE_TEXT, sign)
                self.has_arguments = self.has_arguments or (self._is_argument and not is_text)
                self._has_alias = self._has_alias or (self._is_argument and self._key in self._aliases)
                return at
            case _:
                self._break()
                return at
        return at + 1

    def _begin(self, expects: _Expects, sign: str) -> None:
        self._expects, self._value = expects, JsonValue(sign)
        self._parts, self._num_held = [], 0

    def _is_unused(self, *, is_repeated: bool) -> bool:
        """Return whether the current key is not part of a call."""
        if self._key in self._aliases:
            return (
                is_repeated or self._key not in self._known_keys or (self._is_argument and self.name is None)
            )
        return self._key not in self._known_keys or (is_repeated and self._has_alias and self.has_arguments)

    def _begin_extra(self) -> None:
        """Add the current key and its value to `extra`."""
        self._is_extra = True
        self._extra += [*self._parts, ": "]

    def _break(self) -> None:
        self.is_over = self.is_broken = True

    def _read_text(self, text: str, at: int) -> int:
        num_chars = self._value.read(text[at:] if at else text)
        part = text[at : at + num_chars]
        is_key = self._expects is _Expects.KEY_TEXT
        if is_key or self._is_name:
            num_free = MAX_NAME - self._num_held
            if num_chars > num_free:
                self._break()
                return at + num_free + 1
            self._num_held += num_chars
            self._parts.append(part)
        elif self._is_argument:
            held = self._value.is_string or self._value.is_scalar
            (self._parts if held else self._fresh).append(part)
        elif self._is_extra:
            self._extra.append(part)
        if self._value.is_over:
            self._end_text(is_key)
        return at + num_chars

    def _end_text(self, is_key: bool) -> None:
        if is_key:
            self._key = unquoted("".join(self._parts))
            self._expects = _Expects.COLON
            if self._is_keyed and self.name is None:
                self.name, self._key = self._key.strip(), "arguments"
                if not self.name:
                    self._break()
            self._is_extra = False
            is_repeated = self.name is not None if self._is_name else self.has_arguments and self._is_argument
            if self._is_unused(is_repeated=is_repeated):
                self._begin_extra()
                if self._is_strict and not self.has_arguments:
                    self._break()
            elif is_repeated and not self._has_alias:
                self._extra += self._parts
                self._break()
            return
        if self._is_name:
            self.name = unquoted("".join(self._parts)).strip()
            self._has_alias = self._key in self._aliases
            if not self.name:
                self._break()
        elif self._is_argument:
            self._end_arguments()
        self._expects = _Expects.COMMA

    def _end_arguments(self) -> None:
        """Complete the arguments: decode a string with JSON in it, and replace null or no text by an empty object."""
        held, self._parts = "".join(self._parts), []
        if self._value.is_string:
            text = unquoted(held)
            held = text.strip() or "null"
            if held != "null" and held[0] not in "{[":
                held = quoted(text)
            self.has_arguments = held[0] == "{" or not self._is_strict
        self._fresh.append("{}" if held == "null" else held)
