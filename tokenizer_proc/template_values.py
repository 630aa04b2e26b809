"""Message values whose form depends on the place in the chat template that uses them.

OpenAI's API gives a content as text, as a list of parts or as null, and arguments of calls as JSON text. Published
templates disagree on what they expect. Each class here acts as the form that the expression at hand asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, filters, tests

UNREADABLE = "INVALID_JSON"
"""Key under which a template that asks for pairs finds arguments that are no JSON object."""
MAX_ENCODED_TWICE = 2

Part = dict[str, Any]


class NoContent(str):
    """Content that is null: none to every test, and empty text where a template writes or joins it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Compare as none and as empty text alike."""
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        """Negate `__eq__`: a str has a comparison of its own."""
        return not self == other

    __hash__ = str.__hash__

    def __getitem__(self, key: Any) -> Any:
        """Return an empty part for 0 and -1, else what an empty str has there."""
        return text_part("") if key in (0, -1) else ""[key]


class PartsText(str):
    """Text for a template that iterates parts: text to tests and operators, one text part to loops and indexes."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        """Yield the text as its only part."""
        return iter([text_part(str(self))])

    def __getitem__(self, key: Any) -> Any:
        """Return the part for 0 and -1, else what a str has there."""
        return text_part(str(self)) if key in (0, -1) else str(self)[key]


class Parts(list[Part]):
    """A list of parts: a list to tests and loops, the joined text where a template writes or joins it."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the texts of the text parts, joined by line breaks."""
        return "\n".join(part["text"] for part in self if isinstance(part.get("text"), str))

    def __add__(self, other: Any) -> Any:
        """Join with text, else concatenate."""
        return str(self) + other if isinstance(other, str) else [*self, *other]

    def __radd__(self, other: Any) -> Any:
        """Join with text before it, else concatenate."""
        return other + str(self) if isinstance(other, str) else [*other, *self]

    def __contains__(self, item: object) -> bool:
        """Search the text for text, the parts for anything else."""
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        """Return the text's method of this name: strip, split, startswith and others that lists lack."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(str(self), name)


class Arguments(dict[str, Any]):
    """Arguments of a past call: an object to tests, filters and loops, JSON text where a template writes or joins it."""

    __slots__ = ("text",)

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        """Return the JSON text as the client sent it."""
        return self.text

    def __add__(self, other: Any) -> Any:
        """Join with text behind it."""
        return self.text + other

    def __radd__(self, other: Any) -> Any:
        """Join with text before it."""
        return other + self.text


class UnreadableArguments(Arguments):
    """Arguments that are no JSON object. Filter ``tojson`` writes the text as it is: so the model wrote it."""

    __slots__ = ()


def text_part(text: str) -> Part:
    """Return a content part that is text."""
    return {"type": "text", "text": text}


def arguments_of(sent: Any) -> Arguments:
    """Return the arguments of a past call. Never fails: they may be cut off, or the model erred."""
    if sent is None or sent == "":
        return Arguments({}, "{}")
    if isinstance(sent, dict):
        return Arguments(sent, json.dumps(sent, ensure_ascii=False))
    text = sent if isinstance(sent, str) else json.dumps(sent, ensure_ascii=False)
    value: Any = text
    for _ in range(MAX_ENCODED_TWICE):  # some clients encode JSON text again
        if isinstance(value, str):
            text, value = value, _decoded(value)
    if isinstance(value, dict):
        return Arguments(value, text)
    if value is None:
        return Arguments({}, "{}")
    original = sent if isinstance(sent, str) else text
    return UnreadableArguments({UNREADABLE: original}, original)


def _decoded(text: str) -> Any:
    """Return the value of JSON text; a number stands for what is none."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be tokenized
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
    """Write JSON without Jinja's escapes of HTML, as transformers does."""
    if isinstance(value, UnreadableArguments):
        return value.text
    return json.dumps(
        _without_null_content(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _without_null_content(value: Any) -> Any:
    """Return a value with null in the place of `NoContent`, which stands in messages alone."""
    if isinstance(value, NoContent):
        return None
    if isinstance(value, dict) and isinstance(value.get("content"), NoContent):
        return {**value, "content": None}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return [_without_null_content(item) for item in value]
    return value


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, NoContent)


def _never_null(name: str) -> Callable[[Any], bool]:
    """Return the test of this name, with `NoContent` failing it."""
    test: Any = tests.TESTS[name]
    return lambda value: not isinstance(value, NoContent) and bool(test(value))


def install(environment: Environment) -> None:
    """Make the tests and filters of an environment know the classes of this module."""
    environment.filters["tojson"] = _tojson
    environment.filters["items"] = _items
    environment.tests["none"] = _is_none
    for name in ("string", "iterable", "sequence"):
        environment.tests[name] = _never_null(name)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Yield pairs; of null content, as of what is undefined, none."""
    return iter(()) if isinstance(value, NoContent) else filters.do_items(value)
