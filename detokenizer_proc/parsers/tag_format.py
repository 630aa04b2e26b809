"""Syntax of tool calls as tags, for the reader in `tagged_calls`."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass

_WITH_KIND = re.compile(r'(.*?)\s+string="(true|false)"', re.DOTALL)
"""A DeepSeek parameter's name, and the attribute that is true for text and false for JSON."""
_ATTRIBUTES = re.compile(r'\s*(?:\w+="[^"]*"\s*)*')
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_KEY_TYPE = re.compile(r"([^<]*)</ifm\|arg_key>\s*(?:<ifm\|arg_type>\s*(\w*)\s*</ifm\|arg_type>)?\s*")


def without_quotes(name: str) -> str:
    """Return a name without quotes and the slash of an empty tag."""
    return name.strip().removesuffix("/").strip().strip("\"'").strip()


def _key_of(text: str) -> tuple[str, str]:
    """Return a key, and its value's type if DeepSeek's attribute states it."""
    kind = _WITH_KIND.fullmatch(text)
    if kind is None:
        return without_quotes(text), ""
    return without_quotes(kind[1]), "string" if kind[2] == "true" else "json"


def attribute(text: str, name: str) -> str:
    """Return the value of an attribute; empty if there is none, or other text. ``&quot;`` and ``&amp;`` stand for characters."""
    found = dict(_ATTRIBUTE.findall(text)) if _ATTRIBUTES.fullmatch(text) else {}
    return html.unescape(found.get(name, "")).strip()


def key_attributes(text: str) -> tuple[str, str]:
    """Return a key and its type in Kimi K3's ``key="a" type="string"``."""
    key = attribute(text, "key")
    return (key, attribute(text, "type")) if key else (without_quotes(text), "")


def key_before_type(text: str) -> tuple[str, str]:
    """Return a key and its type in K2 Horizon's ``a</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>``."""
    found = _KEY_TYPE.fullmatch(text)
    if found is None:
        return without_quotes(text), ""
    return found[1].strip(), "" if found[2] == "any" else found[2] or ""


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Syntax of a model's calls."""

    begins: tuple[str, ...]
    """Marks before a call or a group of calls."""
    parameter: str
    key_end: str
    value_end: str
    ends: tuple[str, ...]
    """Marks that end a call. They also end a value without an end tag."""
    function: str = ""
    """Mark before a name; empty if the name directly follows ``begins``."""
    name_end: str = ""
    """Mark after a name; empty if the first parameter or the end directly follows."""
    value_begin: str = ""
    """Mark before a value, after whitespace."""
    has_lines: bool = False
    """A value is on separate lines between its tags."""
    can_omit_begin: bool = False
    """A call may begin with its function's tag."""
    quotes: tuple[str, ...] = ()
    """Optional marks around a value: those of XML's CDATA."""
    fillers: tuple[str, ...] = ()
    """Text between ``begins`` and a function's tag, or after a name; ignored."""
    around: tuple[str, ...] = ()
    """Marks before a group of calls, each with a mark of its own; ignored."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Other spellings of marks or of their beginnings, each with the usual one."""
    name_of: Callable[[str], str] = without_quotes
    """Extracts the name from the text of a function's tag; empty if it has none."""
    key_of: Callable[[str], tuple[str, str]] = _key_of
    """Extracts the key and its value's type (empty if not stated) from the text of a parameter's tag."""
    within: tuple[str, ...] = ()
    """Special tokens inside marks."""

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        parts = (self.function, self.name_end, self.parameter, self.key_end, self.value_begin, self.value_end)
        groups = (self.begins, self.ends, self.quotes, self.fillers, self.around, self.within)
        written = (other for other, _ in self.spellings)
        return frozenset({*parts, *written, *(mark for group in groups for mark in group)} - {""})
