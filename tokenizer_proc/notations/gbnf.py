r"""Normal form of GBNF, the grammar notation of llama.cpp and xgrammar, for the grammar library's converter to Lark.

The converter accepts fewer spellings than the servers: a rule on several lines only with ``|`` at the end of a line, no
escapes such as ``\-``, and no rule named ``start``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_RULE = re.compile(r"[A-Za-z_][\w-]*\s*::=")
_IS_GBNF = re.compile(rf"^[ \t]*{_RULE.pattern}", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    " (?P<text> (?:\\.|[^"\\])* ) (?P<text_end> "? )
    | \[ (?P<chars> (?:\\.|[^\]\\])* ) (?P<chars_end> \]? )
    | (?P<repeated> (?<=[}+*?]) \s* \) (?=\s*[{+*?]) )
    | (?P<gap> (?:\s|\#[^\n]*)+ )
    | (?P<name> [A-Za-z_][\w-]* )
    """,
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<one>.))|(?P<plain>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPED = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF: a line begins with a rule's name and ``::=``."""
    return _IS_GBNF.search(grammar) is not None


def plain_gbnf(grammar: str) -> str:
    """Return an equivalent grammar with each rule on one line, without comments, and with few escapes.

    Raises `ValueError` for an unpaired surrogate.
    """
    has_start = re.search(r"\bstart\b", grammar) is not None
    other = "start-0"
    while has_start and other in grammar:
        other += "0"

    def plain(match: re.Match[str]) -> str:
        if match["text_end"]:
            return f'"{"".join(_in_text(char) for char, _ in _chars(match["text"]))}"'
        if match["chars_end"]:
            return _class(match["chars"])
        if match["repeated"]:  # the converter drops the parentheses around one part
            return ' "")'
        if match["gap"]:
            is_end = "\n" in match["gap"] and _RULE.match(grammar, match.end())
            return "\n" if is_end else " "
        return other if match["name"] == "start" else match[0]

    written = _TOKEN.sub(plain, grammar).strip()
    return written.encode("utf-16", "surrogatepass").decode("utf-16")  # escapes may be pairs of surrogates


def _chars(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a literal or class, and True for those that were escaped."""
    for match in _CHAR.finditer(text):
        if (plain := match["plain"]) is not None:
            yield plain, False
        elif (one := match["one"]) is not None:
            yield _CONTROLS.get(one, one), True
        else:
            yield chr(min(int(match["x"] or match["u"] or match["U"], 16), 0x10FFFF)), True


def _in_text(char: str) -> str:
    if char in _ESCAPED:
        return _ESCAPED[char]
    return f"\\x{ord(char):02x}" if ord(char) < 0x20 or char == "\x7f" else char


def _in_class(char: str) -> str:
    return char if char.isalnum() or not char.isascii() else f"\\x{ord(char):02x}"


def _class(text: str) -> str:
    """Return a character class in which every character is a letter, a digit or an escape, except those of its syntax."""
    chars = list(_chars(text))
    start = "^" if chars[:1] == [("^", False)] else ""
    written, at = [], len(start)
    while at < len(chars):
        first = _in_class(chars[at][0])
        if at + 2 < len(chars) and chars[at + 1] == ("-", False):
            written.append(f"{first}-{_in_class(chars[at + 2][0])}")
            at += 3
        else:
            written.append(first)
            at += 1
    return f"[{start}{''.join(written)}]"
