r"""Translation of regular expressions of JavaScript and Python to the grammar library's syntax, which is Rust's.

The syntaxes differ in a few places, in which Rust reports an error or means something else: an opening bracket, ``&&``,
``--`` and ``~~`` within a class, braces that are no repetition, and the escapes ``\Z``, ``\0``, ``\<`` and ``\>``.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    \\ (?: [pPxu]\{[^}]{0,64}\} | 0(?![0-9]) | . )                  # escape
    | \[ \^? \]? (?: \\. | \[:\^?[a-z]{1,8}:\] | [^\]\\] )* \]?  # class
    | \{ (?! \d+ (?: ,\d* )? \} | , )                           # brace without repetition
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(
    r"\\(?:[pPxu]\{[^}]{0,64}\}|0(?![0-9])|.)|\[:\^?[a-z]{1,8}:\]|\[|&&|~~|(?P<first>^\^?)?--", re.DOTALL
)
_UNCHANGED = re.compile(r"(?:&&|--)\[|^\[\^\][*+?{]")
"""Classes left to the library: nested ones, also of JavaScript's flag ``v``, and JavaScript's any character, ``[^]``."""
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_ESCAPES = {r"\Z": r"\z", r"\0": r"\x00", r"\<": "<", r"\>": ">"}


def escaped(text: str) -> str:
    """Return an expression that matches a text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def as_rust(pattern: str) -> str:
    """Return an equivalent expression in Rust's syntax. Unsupported expressions are left to the library's error."""
    return _TOKEN.sub(_plain, pattern)


def _plain(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] == "[":
        is_whole = text[-1] == "]" and not _UNCHANGED.search(text)
        return f"[{_IN_CLASS.sub(_plain_in_class, text[1:-1])}]" if is_whole else text
    return r"\{" if text == "{" else _ESCAPES.get(text, text)


def _plain_in_class(match: re.Match[str]) -> str:
    text = match[0]
    if text[0] == "\\":
        return _ESCAPES.get(text, text)
    if text.endswith("--"):
        first = match["first"]
        return r"-\-" if first is None else first + r"\--"
    return text if text.startswith("[:") else "".join(rf"\{char}" for char in text)
