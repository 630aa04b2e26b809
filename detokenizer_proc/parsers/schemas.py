"""Parameter types from a request's tools, for formats with untyped arguments."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quintet.detokenizer_proc.parsers.json_repair import repaired
from quintet.detokenizer_proc.parsers.json_scan import encodable, quoted
from quintet.detokenizer_proc.parsers.literals import PYTHON, Literals
from quintet.wire.structured import PYTHON_TYPES, json_type_of

MAX_DEPTH = 8
"""Maximum nesting of alternatives and references for the types of a value."""
MAX_ALTERNATIVES = 32
"""Schemas that are searched for a nested value."""

Types = frozenset[str]
_COMBINED = ("anyOf", "oneOf", "allOf")


class Schemas:
    """JSON types of each function's parameters."""

    def __init__(self, tools: bytes) -> None:
        """``tools`` is the request's list in OpenAI's format; invalid entries are ignored."""
        self._types: dict[str, dict[str, Types]] = {}
        self._nested: dict[str, tuple[_Types, Mapping[str, Any]]] = {}
        try:
            listed = msgspec.json.decode(tools) if tools else []
        except (msgspec.DecodeError, RecursionError):
            listed = []
        for tool in listed if isinstance(listed, list) else []:
            function = _mapping(_mapping(tool).get("function", tool))
            parameters = _mapping(function.get("parameters"))
            found = _Types({**_mapping(parameters.get("$defs")), **_mapping(parameters.get("definitions"))})
            name = str(function.get("name"))
            self._types[name], self._nested[name] = found.of_properties(parameters), (found, parameters)

    def types(self, function: str, parameter: str) -> Types:
        """Return the allowed types of a parameter; empty if unknown."""
        return self._types.get(function, {}).get(parameter, frozenset())

    def types_at(self, function: str, path: Sequence[str]) -> Types:
        """Return the allowed types of a value inside a parameter; empty if unknown. ``item`` is one of a list."""
        if function not in self._nested or len(path) > MAX_DEPTH:
            return frozenset()
        found, parameters = self._nested[function]
        schemas: list[Any] = [parameters]
        for key in path:
            schemas = [child for schema in schemas for child in found.children(schema, key)]
        return frozenset().union(*(found.of(schema) for schema in schemas))

    def key_after_name(self, text: str) -> str:
        """Return the parameter in the text of a function's name and one of its parameters; else an empty text."""
        named = [(text.removeprefix(name).strip(), known) for name, known in self._types.items() if name]
        return next((key for key, known in named if key in known and key != text), "")

    def lack(self, function: str, parameter: str) -> bool:
        """Return whether a function has parameters, but not this one."""
        known = self._types.get(function, {})
        return bool(known) and parameter not in known


def json_of(text: str, types: Types) -> str:
    """Convert a parameter's text to JSON of one of the types, or of any type if ``types`` is empty."""
    trimmed = text.strip()
    if "string" in types:
        if trimmed in {"None", "null"} and "null" in types:
            return "null"
        is_nested = _nested_type(trimmed) in types and _is_json(trimmed)
        return trimmed if is_nested else quoted(text)
    if "boolean" in types and trimmed.lower() in {"true", "false"}:
        return trimmed.lower()
    if trimmed in {"None", "null"}:
        return "null"
    if _is_json(trimmed):
        return trimmed
    if _nested_type(trimmed) and types & {"array", "object"}:
        fixed = repaired(trimmed)
        if not _is_json(fixed) or "\\" in trimmed:  # escapes of Python that JSON lacks
            found = _unescaped(trimmed) or _from_python(trimmed)
            return found or (fixed if _is_json(fixed) else quoted(text))
        return fixed
    return quoted(text)


def fields_of(text: str) -> str | None:
    """Return the text between the braces of a JSON object; None for other text."""
    trimmed = text.strip()
    return trimmed[1:-1].strip() if trimmed[:1] == "{" and _is_json(trimmed) else None


def _nested_type(text: str) -> str:
    """Return the type of a list or an object by its bracket; empty for other text."""
    return {"[": "array", "{": "object"}.get(text[:1], "")


def _unescaped(text: str) -> str | None:
    """Decode JSON with escaped quotes, as inside a JSON string; None if invalid."""
    try:
        found = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
    return encodable(found) if _is_json(found) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError):
        return False
    return True


def _from_python(text: str) -> str | None:
    """Convert a Python list or dictionary to JSON; None if invalid."""
    reader = Literals(PYTHON)
    reader.read("value=" + text + ")", is_last=True)
    found = "{" + reader.take()
    try:
        value = json.loads(found)["value"]
    except (ValueError, KeyError, RecursionError):
        return None
    return encodable(json.dumps(value, ensure_ascii=False))


def _number(text: str) -> float:
    """Parse a finite number. Python's parser also accepts NaN and infinity, which are not JSON."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return number


class _Types:
    """Types allowed by the schemas of one function. Each definition is resolved once and cached."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[str, Types] = {}

    def of_properties(self, schema: object) -> dict[str, Types]:
        """Return the types of the properties of an object or of its alternatives."""
        found: dict[str, Types] = {}
        for each in self._alternatives(schema):
            for key, value in _mapping(each.get("properties")).items():
                found[key] = found.get(key, frozenset()) | self.of(value)
        return found

    def children(self, schema: object, key: str) -> list[Any]:
        """Return the schemas of an object's value under a key, or of a list's items for the key ``item``."""
        found: list[Any] = []
        for each in itertools.islice(self._alternatives(schema), MAX_ALTERNATIVES):
            properties, items = _mapping(each.get("properties")), each.get("items")
            if key in properties:
                found.append(properties[key])
            elif key == "item" and isinstance(items, dict):
                found.append(items)
            elif isinstance(each.get("additionalProperties"), dict):
                found.append(each["additionalProperties"])
        return found[:MAX_ALTERNATIVES]

    def _alternatives(self, schema: object) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and its alternatives, with references resolved."""
        schemas, seen = [schema], set[str]()
        while schemas:
            each = _mapping(schemas.pop())
            yield each
            schemas += _parts(each)
            reference = str(each.get("$ref", "")).rpartition("/")[2]
            if reference and reference not in seen:
                seen.add(reference)
                schemas.append(self._definitions.get(reference))

    def of(self, schema: object, depth: int = 0) -> Types:
        """Return the types that a schema allows; empty if it has no type."""
        schema = _mapping(schema)
        if depth > MAX_DEPTH:
            return frozenset()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._named(reference.rpartition("/")[2], depth + 1)
        stated = schema.get("type")
        if isinstance(stated, str):
            return frozenset({_json_type(stated)})
        if isinstance(stated, list):
            return frozenset(_json_type(str(part)) for part in stated)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return frozenset(map(json_type_of, values))
        return frozenset().union(*(self.of(part, depth + 1) for part in _parts(schema)))

    def _named(self, name: str, depth: int) -> Types:
        if name not in self._known:
            self._known[name] = frozenset()  # a recursive reference adds no types
            self._known[name] = self.of(self._definitions.get(name), depth)
        return self._known[name]


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of a schema."""
    return [part for key in _COMBINED if isinstance(schema.get(key), list) for part in schema[key]]


def _json_type(name: str) -> str:
    """Return JSON Schema's name of a type; some tools write Python's names or capitals."""
    return PYTHON_TYPES.get(name.lower(), name.lower())


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
