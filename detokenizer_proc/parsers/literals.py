"""Streaming conversion of Python's or Gemma's literals to JSON.

An invalid value becomes a string, so the JSON is valid if brackets and quotes are balanced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from quintet.detokenizer_proc.parsers.json_scan import quoted
from quintet.detokenizer_proc.parsers.marks import Marks

_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_PREFIXES = frozenset({"r", "b", "f", "u", "rb", "br", "fr", "rf"})
MAX_PREFIX = 2
_CLOSERS = {"[": "]", "(": "]", "{": "}"}
_MARK = r"""(?:<escape>|<\|"\|>|["'])?"""
_AFTER_STRING = re.compile(
    rf",(?:\s*{_MARK}[\w.\-]+{_MARK}\s*:|[\w.\-]+=(?!=)|\s*[\])}}])|[\])}}\s]*<\|?/?(?:\w+_)?(?:tool|function)_call\|?>"
)
"""Text after a string of `GEMMA`: another key, or a mark of a call."""
_PART_AFTER_STRING = re.compile(
    rf"""(?:,\s*(?:<[|"\w]*>?|["'])?[\w.\-]*{_MARK}(?:<[|"\w]*)?\s*=?|[\])}}\s]*(?:<[|/\w]*)?)"""
)
MAX_NUMBER = 64
MAX_FOLLOWING = 64
"""Characters after a quote that are searched for the end of its string."""


@dataclass(frozen=True, slots=True)
class Notation:
    """Syntax of values."""

    quotes: tuple[str, ...]
    has_escapes: bool


PYTHON = Notation(("'", '"'), has_escapes=True)
JSON = Notation(('"',), has_escapes=True)
GEMMA = Notation(("<escape>", '<|"|>'), has_escapes=False)


def json_word(word: str) -> str:
    """Convert a bare word to JSON: a number, a constant, or a string."""
    if word in _WORDS:
        return _WORDS[word]
    if len(word) <= MAX_NUMBER and (word[:1].isdigit() or word[:1] in {"-", "+", "."}):
        if _JSON_NUMBER.fullmatch(word) and math.isfinite(float(word)):
            return word
        try:
            return str(int(word, 10 if word.isdigit() else 0))
        except ValueError:
            pass
        try:
            number = float(word)
        except ValueError:
            pass
        else:
            if math.isfinite(number):
                return repr(number)
    return quoted(word)


class Literals:
    """Converts a call's arguments, without the opening bracket, to a JSON object without the opening brace."""

    def __init__(self, notation: Notation, call_ends: tuple[str, ...] = ()) -> None:
        """``call_ends``: marks outside strings that end a call without its closing bracket."""
        self.is_over = False
        self._call_ends = Marks(*call_ends)
        self._notation = notation
        self._quotes = Marks(*notation.quotes)
        self._ends: dict[str, Marks] = {}  # by quote
        self._quote: Marks | None = None  # end of the current string
        self._closers = ["}"]
        self._wants_key = True
        self._has_value = False  # of the current item
        self._has_key = False
        self._comma = False  # write a comma before the next item
        self._word: list[str] = []  # characters of the current bare word, without leading whitespace
        self._out: list[str] = []

    def take(self) -> str:
        """Return and clear the new JSON text."""
        out, self._out = self._out, []
        return "".join(out)

    def read(self, text: str, *, is_last: bool = False) -> int:
        """Read text; return the number of consumed characters. The caller passes the rest again with more text.

        ``is_last``: no more text comes.
        """
        at = 0
        while at < len(text) and not self.is_over:
            step = (
                self._in_string(text, at, is_last)
                if self._quote is not None
                else self._outside(text, at, is_last)
            )
            if step == 0:
                break
            at += step
        if is_last:
            self._end_word()
        return at

    def close(self) -> None:
        """Close the open string, lists and objects."""
        if self._quote is not None:
            self._out.append('"')
            self._quote = None
        while self._closers:
            self._close()

    def _outside(self, text: str, at: int, is_last: bool) -> int:
        end = self._call_ends.at_start(text[at : at + MAX_FOLLOWING]) if text[at] == "<" else None
        if end:
            self.close()
        if end or (end == "" and not is_last):
            return 0
        quote = self._quotes.at_start(text[at : at + 16])
        if quote:
            return self._begin_string(text, at, quote, is_last)
        if quote == "" and not is_last:
            return 0
        sign = text[at]
        if sign in PYTHON.quotes and not self._word:
            return self._begin_string(text, at, sign, is_last)
        if sign in _CLOSERS and not self._word:
            self._begin_item()
            closer = _CLOSERS[sign]
            self._out.append("[" if closer == "]" else "{")
            self._closers.append(closer)
            self._wants_key, self._has_value, self._comma = closer == "}", False, False
        elif sign in "])}":
            self._close()
        elif sign == ",":
            self._end_item()
            self._comma = True
            self._wants_key = self._closers[-1] == "}"
        elif self._wants_key and (sign == ":" or (sign == "=" and len(self._closers) == 1)):
            self._end_key()
        elif not sign.isspace() or self._word:
            self._word.append(sign)
        return 1

    def _begin_string(self, text: str, at: int, quote: str, is_last: bool) -> int:
        length = len(quote)
        if self._word:
            if not (self._notation.has_escapes and self._is_string_prefix()):
                self._word.append(quote)  # an apostrophe
                return length
            self._word = []
        if length == 1:
            following = text[at + 1 : at + 3]
            if len(following) < 2 and following in {"", quote} and not is_last:
                return 0  # may begin a triple-quoted string
            if following == quote * 2:
                quote *= 3
        self._begin_item()
        self._out.append('"')
        if quote not in self._ends:
            has_escapes = self._notation.has_escapes or quote[0] in PYTHON.quotes
            self._ends[quote] = Marks(quote, "\\") if has_escapes else Marks(quote)
        self._quote = self._ends[quote]
        return len(quote)

    def _is_string_prefix(self) -> bool:
        return len(self._word) <= MAX_PREFIX and "".join(self._word).lower() in _PREFIXES

    def _in_string(self, text: str, at: int, is_last: bool) -> int:
        assert self._quote is not None
        end, mark = self._quote.search(text, at)
        if is_last and not mark:
            end = len(text)
        if end > at:
            self._out.append(quoted(text[at:end])[1:-1])
            return end - at
        if not mark:
            return 0
        if mark == "\\":
            return self._escape(text, at, is_last)
        following = text[at + len(mark) : at + len(mark) + MAX_FOLLOWING]
        if mark in self._notation.quotes and not self._notation.has_escapes:
            is_end = self._is_marked_end(following, is_last)
        else:
            is_end = mark not in PYTHON.quotes or self._is_end(following, is_last)
        if is_end is None:
            return 0
        self._out.append('"' if is_end else quoted(mark if mark in PYTHON.quotes else '"')[1:-1])
        self._quote = None if is_end else self._quote
        return len(mark)

    def _is_end(self, following: str, is_last: bool) -> bool | None:
        """Return whether a quote ends its string: a comma, a colon or the closing brackets follow. Others lack an escape.

        Returns None until more text decides.
        """
        num_open = len(self._closers)
        end = self._call_ends.at_start(following.lstrip())
        if end or (end == "" and not is_last):
            return True if end else None
        for sign in following:
            if sign.isspace():
                continue
            if num_open == 0:
                return sign not in ")}'\""
            if sign not in "])}":
                return sign in ",:"
            num_open -= 1
        return True if is_last or len(following) == MAX_FOLLOWING else None

    def _is_marked_end(self, following: str, is_last: bool) -> bool | None:
        """Return whether a mark of `GEMMA` ends its string: the next key, closing brackets or a call's mark follow.

        Otherwise it stands for a quote inside the string. Returns None until more text decides.
        """
        text = following.lstrip()
        is_whole = is_last or len(following) == MAX_FOLLOWING
        if not text:
            return True if is_whole else None
        if self._wants_key or _AFTER_STRING.match(text):
            return True
        if _PART_AFTER_STRING.fullmatch(text):
            return True if is_whole else None
        if text[0] == ",":
            return self._closers[-1] == "]"
        closers = self._closers[::-1]
        for number, sign in enumerate("".join(text.split())):
            if number == len(closers):
                return sign not in ")}'\""
            if sign != closers[number]:
                return number > 0 and sign in ",<"
        return True if is_whole else None

    def _escape(self, text: str, at: int, is_last: bool) -> int:
        kind = text[at + 1 : at + 2]
        if not kind and not is_last:
            return 0
        num_digits = _NUM_DIGITS.get(kind)
        if num_digits is None:
            self._out.append(quoted(_ESCAPES.get(kind, "\\" + kind))[1:-1])
            return 1 + len(kind)
        digits = text[at + 2 : at + 2 + num_digits]
        if not set(digits) <= _HEX or (is_last and len(digits) < num_digits):
            self._out.append("\\\\" + kind)
            return 2
        if len(digits) < num_digits:
            return 0
        number = int(digits, 16)
        if number > 0x10FFFF:
            self._out.append("\\\\" + kind)
            return 2
        self._out.append(f"\\u{number:04x}" if 0xD800 <= number < 0xE000 else quoted(chr(number))[1:-1])
        return 2 + num_digits

    def _begin_item(self) -> None:
        """Write the separator before a value or a key."""
        if self._comma:
            self._out.append(", ")
            self._comma = False
        if self._wants_key:
            self._has_key = True
        else:
            self._has_value = True

    def _end_word(self) -> None:
        word, self._word = "".join(self._word).rstrip(), []
        if word:
            self._begin_item()
            self._out.append(quoted(word) if self._wants_key else json_word(word))

    def _end_key(self) -> None:
        self._end_word()
        if not self._has_key:
            self._begin_item()
            self._out.append('""')
        self._out.append(": ")
        self._wants_key = self._has_key = self._has_value = False

    def _end_item(self) -> None:
        """End a value; a key without a value gets null."""
        self._end_word()
        if self._closers[-1] == "}":
            if self._wants_key and self._has_key:
                self._out.append(": null")
            elif not self._wants_key and not self._has_value:
                self._out.append("null")
        self._has_key = self._has_value = False
        self._wants_key = self._closers[-1] == "}"

    def _close(self) -> None:
        self._end_item()
        self._out.append(self._closers.pop())
        self._comma = False
        self.is_over = not self._closers
        self._wants_key, self._has_key, self._has_value = False, False, True
