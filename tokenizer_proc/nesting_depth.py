"""Nesting depth of JSON schemas and grammars with references resolved.

The grammar library recurses to this depth, and a stack overflow kills the process. So deeper schemas are rejected first.
The computed depth is an upper bound: each member of a reference cycle counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.wire.errors import invalid
from quintet.wire.structured import FIELD

MAX_LEVELS = 700
"""The library overflows a thread's 8 MiB stack between 1000 and 2000 levels."""
MAX_BRACKETS = 40
"""Nested brackets in one rule of a grammar; the library allows fewer."""
MAX_SCHEMAS = 64
"""JSON schemas in one grammar."""
MAX_VISITED = 300_000
"""Visited values of a schema; a value counts once per reference to it."""
_DEFINITIONS = frozenset({"$defs", "definitions"})
_TEXT = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/', re.DOTALL)
_RULE = re.compile(r"^[ \t\r]*[?!]*([A-Za-z_][\w\-]*)(?:\[[^\]\n]*\]|\.\d+|[ \t])*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w\-]*")
_QUOTED_OR_BRACE = re.compile(r'"(?:\\.|[^"\\])*"|[{}]')
_SCHEMA = re.compile(r"%json\s*(?=\{)")


@dataclass(slots=True)
class _Part:
    """A definition: its own nesting depth, and the definitions that it references."""

    levels: int
    names: set[str]


def check_schema(schema: object) -> None:
    """Raise `RequestError` for a JSON schema that is nested too deeply."""
    root, num_visited = _counted(schema, MAX_VISITED)
    parts, waiting = {"": root}, list(root.names)
    # References may be relative to an inner id.
    has_inner_ids = b'"$id"' in msgspec.json.encode(_without_id(schema))
    while waiting:
        name = waiting.pop()
        if name in parts:
            continue
        found = None if has_inner_ids else target_of(schema, name)
        is_clear = found is not None
        part, visited = _counted(
            found if is_clear else schema, MAX_VISITED - num_visited, with_definitions=not is_clear
        )
        num_visited += visited
        parts[name] = part
        waiting += part.names
    _check(parts, "a schema")


def _without_id(schema: object) -> object:
    return (
        {key: value for key, value in schema.items() if key != "$id"} if isinstance(schema, dict) else schema
    )


def check_grammar(grammar: str) -> None:
    """Raise `RequestError` for a Lark grammar that is nested too deeply, or has such a schema."""
    for schema in schemas_in(grammar):
        check_schema(schema)
    text = _TEXT.sub('""', grammar)
    rules = list(_RULE.finditer(text))
    ends = [rule.start() for rule in rules[1:]] + [len(text)]
    known = {rule[1] for rule in rules}
    parts: dict[str, _Part] = {}
    for rule, end in zip(rules, ends, strict=False):  # a text without rules has one end
        body = text[rule.end() : end]
        part = parts.setdefault(rule[1], _Part(1, set()))
        part.levels += min(sum(map(body.count, "([{")), MAX_BRACKETS)
        part.names |= known.intersection(_NAME.findall(body))
    _check(parts, "a grammar")


def schemas_in(grammar: str) -> list[object]:
    """Return the JSON schemas in a Lark grammar. Raises `RequestError` for too many."""
    begins = [match.end() for match in _SCHEMA.finditer(grammar)]
    if len(begins) > MAX_SCHEMAS:
        raise invalid(
            f"{FIELD} has a grammar with {len(begins)} schemas, but at most {MAX_SCHEMAS} are allowed.",
            FIELD,
        )
    return [_json_at(grammar, begin) for begin in begins]


def _check(parts: Mapping[str, _Part], kind: str) -> None:
    if (levels := _deepest(parts)) > MAX_LEVELS:
        raise invalid(
            f"{FIELD} has {kind} that may be {levels} levels deep with its references resolved, but at most {MAX_LEVELS} "
            "levels are allowed: make it flatter.",
            FIELD,
        )


def _deepest(parts: Mapping[str, _Part]) -> int:
    """Return the maximum depth of a chain of parts."""
    named_by: dict[str, list[str]] = {}
    num_open = {name: len(part.names) for name, part in parts.items()}
    for name, part in parts.items():
        for other in part.names:
            named_by.setdefault(other, []).append(name)
    depths: dict[str, int] = {}
    ready = [name for name, number in num_open.items() if number == 0]
    while ready:
        name = ready.pop()
        depths[name] = parts[name].levels + max((depths[each] for each in parts[name].names), default=0)
        for other in named_by.get(name, ()):
            num_open[other] -= 1
            if num_open[other] == 0:
                ready.append(other)
    circles = sum(part.levels for name, part in parts.items() if name not in depths)
    return circles + max(depths.values(), default=0)


def _counted(value: object, most: int, *, with_definitions: bool = False) -> tuple[_Part, int]:
    """Return a schema's part, and the number of visited values."""
    skipped_keys = frozenset[str]() if with_definitions else _DEFINITIONS
    part, level, visited = _Part(0, set()), [value], 0
    while level:
        part.levels += 1
        visited += len(level)
        if visited > most:
            raise invalid(f"{FIELD} has a schema with too many references: make it smaller.", FIELD)
        part.names.update(
            each["$ref"] for each in level if isinstance(each, dict) and isinstance(each.get("$ref"), str)
        )
        level = [inner for each in level for inner in _inner(each, skipped_keys)]
    return part, visited


def _inner(value: object, skipped_keys: frozenset[str]) -> Iterable[object]:
    """Return the objects and arrays in a value."""
    if isinstance(value, dict):
        inner: Iterable[object] = (each for key, each in value.items() if key not in skipped_keys)
    else:
        inner = value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]


def target_of(schema: object, reference: str) -> object:
    """Resolve a reference; None if it is not a JSON pointer into the schema, such as an anchor or a URL."""
    found: Any = schema
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
            found = found[int(key[:9])]
        else:
            return None
    return found if reference in {"#", ""} or reference.startswith("#/") else None


def _json_at(text: str, begin: int) -> object:
    """Parse the JSON object at ``begin``. For invalid JSON return an empty schema; the library reports the error."""
    depth = 0
    for match in _QUOTED_OR_BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            try:
                return msgspec.json.decode(text[begin : match.end()])
            except (msgspec.DecodeError, RecursionError):
                break
    return {}
