"""What a request's tools say of their parameters' types, for formats whose arguments have none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from quintet.detokenizer_proc.parsers.json_scan import quoted
from quintet.detokenizer_proc.parsers.literals import PYTHON, Literals

MAX_DEPTH = 8
"""Nested alternatives that are looked into."""

Types = frozenset[str]
_COMBINED = ("anyOf", "oneOf", "allOf")


class Schemas:
    """The JSON types that each function's parameters may have."""

    def __init__(self, tools: bytes) -> None:
        """``tools`` is the request's list, as OpenAI has it; what cannot be read says nothing."""
        self._types: dict[str, dict[str, Types]] = {}
        try:
            listed = msgspec.json.decode(tools) if tools else []
        except (msgspec.DecodeError, RecursionError):
            listed = []
        for tool in listed if isinstance(listed, list) else []:
            function = _mapping(_mapping(tool).get("function", tool))
            parameters = _mapping(function.get("parameters"))
            properties = _mapping(parameters.get("properties"))
            named = {**_mapping(parameters.get("$defs")), **_mapping(parameters.get("definitions"))}
            self._types[str(function.get("name"))] = {
                key: _types_of(schema, named, 0) for key, schema in properties.items()
            }

    def types(self, function: str, parameter: str) -> Types:
        """Return the types that a parameter may have; empty when nothing is known of it."""
        return self._types.get(function, {}).get(parameter, frozenset())


def json_of(text: str, types: Types) -> str:
    """Return a parameter's text as JSON of one of the types; of any, when nothing is known."""
    trimmed = text.strip()
    if "string" in types:
        return "null" if trimmed == "null" and "null" in types else quoted(text)
    if "boolean" in types and trimmed.lower() in {"true", "false"}:
        return trimmed.lower()
    if trimmed in {"None", "null"}:
        return "null"
    try:
        value = json.loads(trimmed)
    except (ValueError, RecursionError):
        pass
    else:
        is_plain = not isinstance(value, float) or value - value == 0.0  # NaN and Infinity are no JSON
        return trimmed if is_plain else quoted(text)
    if trimmed[:1] in {"[", "{"} and types & {"array", "object"}:
        return _from_python(trimmed) or quoted(text)
    return quoted(text)


def _from_python(text: str) -> str | None:
    """Return a list or a dictionary of Python's as JSON."""
    reader = Literals(PYTHON)
    reader.read("value=" + text + ")", is_last=True)
    found = "{" + reader.take()
    try:
        value = json.loads(found)["value"]
    except (ValueError, KeyError, RecursionError):
        return None
    return json.dumps(value, ensure_ascii=False)


def _types_of(schema: object, named: Mapping[str, Any], depth: int) -> Types:
    schema = _mapping(schema)
    if depth > MAX_DEPTH:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types_of(named.get(reference.rpartition("/")[2]), named, depth + 1)
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(map(str, stated))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_type_name, values))
    found: set[str] = set()
    for key in _COMBINED:
        for part in schema.get(key) or () if isinstance(schema.get(key), list) else ():
            found |= _types_of(part, named, depth + 1)
    return frozenset(found)


def _type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
