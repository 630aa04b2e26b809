"""Streaming repair of common errors in a model's JSON. Valid JSON is unchanged.

| Error | Repair |
|---|---|
| control character in a string | its escape |
| backslash that begins no escape | doubled |
| backslash before a single quote | removed |
| comma before a closing bracket | removed |
| brackets that are not closed, at their parent's or at the end | closed, unless the end is within a string |
| closing bracket without an opening one | removed |
| key without a value at the end | null |
| Python's True, False, None; NaN | true, false, null; null |
"""

from __future__ import annotations

import re

_INSIDE = re.compile(r'[\x00-\x1f"\\]')
_OUTSIDE = re.compile(r'[",{}\[\]]|(?<!\w)[TFN][A-Za-z]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NOT_BLANK = re.compile(r"\S")
_CONTROLS = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
MAX_OMITTED = 8
"""Brackets that a closing bracket may close at once."""
CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null"}


class JsonRepair:
    """Repairs one object or list. A text that begins with another character is unchanged."""

    __slots__ = ("_closers", "_comma", "_is_json", "_last", "_last_sign", "_rest", "in_string")

    def __init__(self) -> None:
        self.in_string = False
        self._is_json: bool | None = None  # None before the first character
        self._rest = ""  # part of an escape or a word
        self._comma: list[str] = []  # a comma and whitespace after it
        self._last = ""  # last character before the unread text
        self._last_sign = ""  # last character that is not whitespace
        self._closers: list[str] = []  # of the open brackets

    def take(self, text: str) -> str:
        """Read text; return the repaired text that is final."""
        if self._is_json is None and (first := _NOT_BLANK.search(text)) is not None:
            self._is_json = first[0] in {"{", "["}
        if not (self._is_json and text):
            return text
        text, self._rest = self._last + self._rest + text, ""
        at, out = len(self._last), list[str]()
        while at < len(text):
            if self._comma:
                at = self._read_after_comma(text, at, out)
                continue
            found = (_INSIDE if self.in_string else _OUTSIDE).search(text, at)
            begin, at = at, len(text) if found is None else found.start()
            out.append(text[begin:at])
            if found is None:
                break
            num_read = (self._read_sign_in_string if self.in_string else self._read_sign)(found, out)
            if num_read == 0:
                self._rest = text[at:]
                break
            at += num_read
        self._last = text[at - 1 : at]
        self._last_sign = "".join(out).rstrip()[-1:] or self._last_sign
        return "".join(out)

    def end(self, *, is_cut: bool = False) -> str:
        """End the text; return the text held back, and the missing brackets. ``is_cut``: it has no end, so none are missing."""
        comma, closers, rest = self._comma, self._closers, self._rest
        self._comma, self._closers, self._rest = [], [], ""
        if is_cut or self.in_string or not closers:
            return "".join(comma) + rest
        value = "null" if self._last_sign == ":" and not rest else ""
        return "".join(comma[1:]) + rest + value + "".join(reversed(closers))

    def _read_sign_in_string(self, found: re.Match[str], out: list[str]) -> int:
        """Read a sign in a string, which may begin an escape; return the number of characters, or 0 to wait for more text."""
        text, at, sign = found.string, found.start(), found[0]
        if sign == '"':
            self.in_string = False
        elif sign == "\\":
            escape = _ESCAPE.match(text, at)
            if escape is not None:
                out.append(escape[0])
                return len(escape[0])
            if _PART_OF_ESCAPE.fullmatch(text, at):
                return 0
            if text.startswith("\\'", at):
                out.append("'")
                return 2
            sign = "\\\\"
        else:
            sign = _CONTROLS.get(sign) or f"\\u{ord(sign):04x}"
        out.append(sign)
        return 1

    def _read_after_comma(self, text: str, at: int, out: list[str]) -> int:
        """Read the whitespace after a comma; return its end. A closing bracket after it removes the comma."""
        following = _NOT_BLANK.search(text, at)
        end = len(text) if following is None else following.start()
        self._comma.append(text[at:end])
        if following is not None:
            out += self._comma[1:] if following[0] in {"}", "]"} else self._comma
            self._comma = []
        return end

    def _read_sign(self, found: re.Match[str], out: list[str]) -> int:
        """Read a sign or a word outside strings; return as `_read_sign_in_string`."""
        sign = found[0]
        if sign == ",":
            self._comma = [sign]
            return 1
        if sign in CLOSERS:
            self._closers.append(CLOSERS[sign])
        elif sign in "}]":
            out.append(close_brackets(self._closers, sign))
            return 1
        elif sign == '"':
            self.in_string = True
        elif found.end() == len(found.string) and any(word.startswith(sign) for word in _WORDS):
            return 0
        out.append(_WORDS.get(sign, sign))
        return len(sign)


def close_brackets(closers: list[str], sign: str) -> str:
    """Remove the brackets that a closing bracket closes from the end of ``closers``; return them, innermost first.

    A model may omit the closing brackets inside. Empty if it closes none of the last `MAX_OMITTED`.
    """
    for num_closed in range(1, min(len(closers), MAX_OMITTED) + 1):
        if closers[-num_closed] == sign:
            closed = "".join(reversed(closers[-num_closed:]))
            del closers[-num_closed:]
            return closed
    return ""


def repaired(text: str) -> str:
    """Repair a whole text."""
    repair = JsonRepair()
    return repair.take(text) + repair.end(is_cut=True)
