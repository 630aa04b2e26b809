"""Bounded whitespace in constrained JSON: at most one blank, or a line break and the schema's maximum indentation.

With unbounded whitespace, an uncertain model may write blanks until its token limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INDENT = 4
"""Maximum blanks per level."""
MIN_LEVELS, MAX_LEVELS = 2, 10
"""At least 2, because a tool call's arguments are inside another object."""
OPEN_LEVELS = 4
"""Levels assumed for a schema that does not specify the inner values."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def whitespace_of(schema: object) -> str:
    """Return the regular expression of the whitespace in JSON of this schema."""
    levels = min(MAX_LEVELS, max(MIN_LEVELS, 1 + _levels(schema, MAX_LEVELS)))
    return rf"[ \t]|\r?\n[ \t]{{0,{INDENT * levels}}}"


def with_blanks(options: Mapping[str, Any], schema: object) -> dict[str, Any]:
    """Add bounded whitespace for this schema to the library's options, unless they already define whitespace."""
    if "whitespace_pattern" in options or not options.get("whitespace_flexible", True):
        return dict(options)
    return {**options, "whitespace_pattern": whitespace_of(schema)}


def _levels(schema: object, most: int) -> int:
    """Return the nesting depth of objects and arrays in the schema, at most ``most``."""
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
