"""Blanks between the parts of constrained JSON: at most one, or a line break and the indentation that the schema can need.

Where any amount is allowed, models that are not sure how to go on write blanks until their tokens are spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INDENT = 4
"""Of one level, at most."""
MIN_LEVELS, MAX_LEVELS = 2, 10
"""A call's arguments stand in an object of their own, which may be indented too."""
OPEN_LEVELS = 4
"""Counted for a schema that says nothing of what lies within."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def whitespace_of(schema: object) -> str:
    """Return the expression of what may stand between the parts of JSON that this schema describes."""
    levels = min(MAX_LEVELS, max(MIN_LEVELS, 1 + _levels(schema, MAX_LEVELS)))
    return rf"[ \t]|\r?\n[ \t]{{0,{INDENT * levels}}}"


def with_blanks(options: Mapping[str, Any], schema: object) -> dict[str, Any]:
    """Return options of the library for JSON of this schema, with bounded blanks unless they say what is allowed."""
    if "whitespace_pattern" in options or not options.get("whitespace_flexible", True):
        return dict(options)
    return {**options, "whitespace_pattern": whitespace_of(schema)}


def _levels(schema: object, most: int) -> int:
    """Return how many objects and arrays lie within each other, as far as the schema says; at most ``most``."""
    if not isinstance(schema, Mapping) or "$ref" in schema or most <= 0:
        return min(most, OPEN_LEVELS)
    if "enum" in schema or "const" in schema:
        return 1
    inner = [each for key in _LISTED for each in _list(schema.get(key))]
    alternatives = max((_levels(each, most) for each in inner), default=0)
    if schema.get("type") in ("string", "integer", "number", "boolean", "null"):
        return alternatives
    within = _values(schema.get("properties"))
    within += [schema[key] for key in _SINGLE if key in schema and schema[key] is not False]
    if not within:
        return alternatives if inner else min(most, OPEN_LEVELS)
    return max(alternatives, 1 + max(_levels(each, most - 1) for each in within))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _values(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, Mapping) else []
