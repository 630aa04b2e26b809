"""Rewriting of JSON schemas to equivalent ones that the grammar library supports (JSON Schema, draft 2020-12).

Keywords without effect are dropped, such as ``propertyNames: {"type": "string"}`` and unknown formats, which are
annotations. Some unsupported keywords are replaced by equivalent supported ones. The library enforces the rest, or
rejects it by name.

Whitespace in constrained JSON is bounded: at most one blank, or a line break and the schema's maximum indentation.
With unbounded whitespace, an uncertain model may write blanks until its token limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.tokenizer_proc.notations.schema_keywords import RULES, Rules, Schema, is_anything, plain_names
from quintet.tokenizer_proc.notations.schema_unions import (
    Root,
    disjoin,
    enumerated,
    require_discriminator,
    write_out_set,
)

INNER = frozenset({
    "items", "prefixItems", "additionalProperties", "additionalItems", "anyOf", "oneOf", "allOf", "not", "if", "then",
    "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "components",
})  # fmt: skip
"""Keys with a schema, or a list of schemas."""
NAMED_INNER = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "schemas", "dependentSchemas"}
)
"""Keys with an object of schemas by name. ``components/schemas`` are those of OpenAPI."""
MAX_WRITTEN_OUT = 2000
"""Enumerated alternatives of sets per schema."""
_NULLABLE = frozenset({"const", "default", "examples", "example"})
"""Keys that may be null. Null for another key means that a serializer wrote a missing value."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


def plain_schema(schema: Any) -> Any:
    """Return an equivalent schema without ineffective keywords, and with replacements of some unsupported keywords."""
    is_all_of_named = any("/allOf/" in str(each.get("$ref")) for each in schemas_of(schema))
    plain = _plain(schema, RULES[is_all_of_named:])  # without the rule that moves the schemas in allOf
    if not isinstance(plain, dict):
        return plain
    anchors = {"$dynamicAnchor": "$dynamicRef", "$recursiveAnchor": "$recursiveRef"}
    found = list(schemas_of(plain))
    _lift_definitions(found)
    used = set[str]().union(*found)
    root = Root(plain)
    num_written_out = 0
    for each in found:
        for anchor, reference in anchors.items():
            if reference not in used:
                each.pop(anchor, None)
        _join_patterns_of_one_name(each)
        plain_names(each, enumerated(each.get("propertyNames"), root))
        require_discriminator(each, root)
        num_written_out += write_out_set(each, root, MAX_WRITTEN_OUT - num_written_out)
    for each in found:
        disjoin(each, root)
    return plain


def schemas_of(schema: Any) -> Iterator[Schema]:
    """Yield the schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            yield each
            waiting += [each[key] for key in INNER if key in each]
            for key in NAMED_INNER:
                named = each.get(key)
                waiting += named.values() if isinstance(named, dict) else ()


def _lift_definitions(schemas: list[Schema]) -> None:
    """Copy definitions of inner schemas to the first schema, the root, unless two of a name differ.

    References name definitions of the root. Servers of MCP put whole schemas with definitions into those of tools.
    """
    root, *inner = schemas
    for key in ("$defs", "definitions"):
        named = [each[key] for each in inner if isinstance(each.get(key), dict)]
        own = root.get(key, {})
        names = dict.fromkeys(name for each in named for name in each)
        for name in names if isinstance(own, dict) else ():
            first, *others = [each[name] for each in named if name in each]
            if name not in own and all(each == first for each in others):
                root[key] = own = {**own, name: first}


def _join_patterns_of_one_name(schema: Schema) -> None:
    """Move the schema of a pattern that matches only a declared property (``^name$``) to that property.

    The library excludes declared names from patterns, and fails if nothing is left.
    """
    properties, by_pattern = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(by_pattern, dict):
        return
    for name in [each for each in properties if f"^{each}$" in by_pattern and _PLAIN_NAME.fullmatch(each)]:
        inner, declared = by_pattern.pop(f"^{name}$"), properties[name]
        is_part = isinstance(inner, dict) and isinstance(declared, dict) and inner.items() <= declared.items()
        properties[name] = declared if is_part else {"allOf": [declared, inner]}


def _plain(schema: Any, rules: Rules) -> Any:
    if isinstance(schema, list):
        return [_plain(each, rules) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: _plain_value(key, value, rules)
        for key, value in schema.items()
        if value is not None or key in _NULLABLE
    }
    for rule in rules:
        rule(plain)
    return False if is_anything(plain.get("not")) else plain


def _plain_value(key: str, value: Any, rules: Rules) -> Any:
    if key in INNER:
        return _plain(value, rules)
    if key in NAMED_INNER and isinstance(value, dict):
        return {name: _plain(each, rules) for name, each in value.items()}
    return value


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
