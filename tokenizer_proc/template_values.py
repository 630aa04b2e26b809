"""Message values that adapt to the expression of the chat template.

In OpenAI's API a content is text, a list of parts or null, and arguments of calls are JSON text. Published templates
expect different types. Each class behaves as the type that the current expression expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, filters

UNREADABLE = "INVALID_JSON"
"""Key of invalid JSON arguments for templates that iterate pairs."""
MAX_ENCODED_TWICE = 2

Part = dict[str, Any]


class NoContent(str):
    """Null content: none in tests, an empty list in loops, empty text when written or joined."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Equal both None and empty text."""
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        """Negate `__eq__`; overrides str's method."""
        return not self == other

    __hash__ = str.__hash__

    def __getitem__(self, key: Any) -> Any:
        """Return an empty part for 0 and -1; index an empty str otherwise."""
        return text_part("") if key in (0, -1) else ""[key]


class PartsText(str):
    """Text for a template that iterates parts: text in tests and operators, one text part in loops and subscripts."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([text_part(str(self))])

    def __getitem__(self, key: Any) -> Any:
        """Return the part for 0 and -1; index the str otherwise."""
        return text_part(str(self)) if key in (0, -1) else str(self)[key]


class ContentParts(list[Part]):
    """A list of parts: a list in tests and loops, the joined text when written or joined."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the text of the text parts, joined by line breaks."""
        return "\n".join(part["text"] for part in self if isinstance(part.get("text"), str))

    def __add__(self, other: Any) -> Any:
        """Concatenate as text with a str, otherwise as a list."""
        return str(self) + other if isinstance(other, str) else [*self, *other]

    def __radd__(self, other: Any) -> Any:
        """Concatenate after a str as text, otherwise as a list."""
        return other + str(self) if isinstance(other, str) else [*other, *self]

    def __contains__(self, item: object) -> bool:
        """Search the text for a str, the parts for other values."""
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        """Return the str method of this name, such as strip, split or startswith."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(str(self), name)


class Arguments(dict[str, Any]):
    """Arguments of a past call: an object in tests, filters and loops, JSON text when written or joined."""

    __slots__ = ("text",)

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        """Return the JSON text as the client sent it."""
        return self.text

    def __add__(self, other: Any) -> Any:
        return self.text + other

    def __radd__(self, other: Any) -> Any:
        return other + self.text


class UnreadableArguments(Arguments):
    """Arguments that are not a JSON object. Filter ``tojson`` writes the text unchanged, as the model wrote it."""

    __slots__ = ()


class TracedMessage(dict[str, Any]):
    """A message that records each read by the template."""

    def __init__(self, message: Mapping[str, Any], index: int, seen: list[int]) -> None:
        super().__init__(message)
        self._index = index
        self._seen = seen

    def __getitem__(self, key: str) -> Any:
        self._seen.append(self._index)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.append(self._index)
        return super().get(key, default)


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def arguments_of(sent: Any) -> Arguments:
    """Parse the arguments of a past call. Never raises: they may be truncated or invalid."""
    if sent is None or sent == "":
        return Arguments({}, "{}")
    if isinstance(sent, dict):
        return Arguments(sent, json.dumps(sent, ensure_ascii=False))
    text = sent if isinstance(sent, str) else json.dumps(sent, ensure_ascii=False)
    value: Any = text
    for _ in range(MAX_ENCODED_TWICE):  # some clients encode JSON text twice
        if isinstance(value, str):
            text, value = value, _decoded(value)
    if isinstance(value, dict):
        return Arguments(value, text)
    if value is None:
        return Arguments({}, "{}")
    original = sent if isinstance(sent, str) else text
    return UnreadableArguments({UNREADABLE: original}, original)


def _decoded(text: str) -> Any:
    """Parse JSON text; return 0 for invalid JSON."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # lone surrogates cannot be tokenized
    except (ValueError, RecursionError):
        return 0
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's HTML escapes, as transformers does."""
    if isinstance(value, UnreadableArguments | NoContent):
        return value.text if isinstance(value, UnreadableArguments) else ""
    return json.dumps(
        _without_null_content(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _without_null_content(value: Any) -> Any:
    """Replace `NoContent` in messages by null."""
    if isinstance(value, dict) and isinstance(value.get("content"), NoContent):
        return {**value, "content": None}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return [_without_null_content(item) for item in value]
    return value


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, NoContent)


def _is_string(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, NoContent)


def install(environment: Environment) -> None:
    """Install tests and filters in an environment that support the classes of this module."""
    environment.filters["tojson"] = _tojson
    environment.filters["items"] = _items
    environment.tests["none"] = _is_none
    environment.tests["string"] = _is_string


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Iterate pairs; empty for null content, as for undefined values."""
    return iter(()) if isinstance(value, NoContent) else filters.do_items(value)
