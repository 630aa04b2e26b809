"""How deep a form is once its references are followed.

The library that builds it descends as far on its thread's stack, and its process ends where no stack is left. So what may be
deeper is refused before. Counted is an upper bound: of what refers to itself in a circle, every member once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.structured import FIELD

MAX_LEVELS = 700
"""Between 1000 and 2000 the library runs out of the 8 MiB that a thread has."""
MAX_BRACKETS = 40
"""Within each other in one rule of a grammar: the library takes fewer."""
MAX_SCHEMAS = 64
"""In one grammar."""
MAX_VISITED = 300_000
"""Values of a schema, those that several references reach as often."""
_DEFINITIONS = frozenset({"$defs", "definitions"})
_TEXT = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/', re.DOTALL)
_RULE = re.compile(r"^[ \t\r]*[?!]*([A-Za-z_][\w\-]*)(?:\[[^\]\n]*\]|\.\d+|[ \t])*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w\-]*")
_QUOTED_OR_BRACE = re.compile(r'"(?:\\.|[^"\\])*"|[{}]')
_SCHEMA = re.compile(r"%json\s*(?=\{)")


@dataclass(slots=True)
class _Part:
    """A definition: what it nests by itself, and which others it names."""

    levels: int
    names: set[str]


def check_schema(schema: object) -> None:
    """Refuse a JSON schema that is too deep. Raises `RequestError`."""
    root, num_visited = _counted(schema, MAX_VISITED)
    parts, waiting = {"": root}, list(root.names)
    has_inner_ids = b'"$id"' in msgspec.json.encode(_without_id(schema))  # from which references may count
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
    """Refuse a grammar of Lark's that is too deep, or has such a schema in it. Raises `RequestError`."""
    for schema in schemas_in(grammar):
        check_schema(schema)
    text = _TEXT.sub('""', grammar)
    rules = list(_RULE.finditer(text))
    ends = [rule.start() for rule in rules[1:]] + [len(text)]
    known = {rule[1] for rule in rules}
    parts: dict[str, _Part] = {}
    for rule, end in zip(rules, ends, strict=True):
        body = text[rule.end() : end]
        part = parts.setdefault(rule[1], _Part(1, set()))
        part.levels += min(sum(map(body.count, "([{")), MAX_BRACKETS)
        part.names |= known.intersection(_NAME.findall(body))
    _check(parts, "a grammar")


def schemas_in(grammar: str) -> list[object]:
    """Return the JSON schemas that stand in a grammar of Lark's. Raises `RequestError` for too many."""
    begins = [match.end() for match in _SCHEMA.finditer(grammar)]
    if len(begins) > MAX_SCHEMAS:
        raise RequestError(
            ErrorCode.INVALID,
            f"{FIELD} holds a grammar with {len(begins)} schemas; it may have {MAX_SCHEMAS}.",
            FIELD,
        )
    return [_json_at(grammar, begin) for begin in begins]


def _check(parts: Mapping[str, _Part], what: str) -> None:
    if (levels := _deepest(parts)) > MAX_LEVELS:
        raise RequestError(
            ErrorCode.INVALID,
            f"{FIELD} holds {what} that may be {levels} levels deep once its references are followed; it may be {MAX_LEVELS}: "
            "make it flatter.",
            FIELD,
        )


def _deepest(parts: Mapping[str, _Part]) -> int:
    """Return how deep the deepest chain of parts may be."""
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
    """Return a schema as a part, and how many values that took."""
    passed_over = frozenset[str]() if with_definitions else _DEFINITIONS
    part, level, visited = _Part(0, set()), [value], 0
    while level:
        part.levels += 1
        visited += len(level)
        if visited > most:
            raise RequestError(
                ErrorCode.INVALID, f"{FIELD} holds a schema with too many references: make it smaller.", FIELD
            )
        part.names.update(
            each["$ref"] for each in level if isinstance(each, dict) and isinstance(each.get("$ref"), str)
        )
        level = [inner for each in level for inner in _inner(each, passed_over)]
    return part, visited


def _inner(value: object, passed_over: frozenset[str]) -> Iterable[object]:
    """Return what lies in a value and has something in it."""
    if isinstance(value, dict):
        inner: Iterable[object] = (each for key, each in value.items() if key not in passed_over)
    else:
        inner = value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]


def target_of(schema: object, reference: str) -> object:
    """Return what a reference names; None where that is not clear: an anchor, an address."""
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
    """Return the JSON that begins there; an empty schema where there is none, which the library refuses."""
    depth = 0
    for match in _QUOTED_OR_BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            try:
                return msgspec.json.decode(text[begin : match.end()])
            except (msgspec.DecodeError, RecursionError):
                break
    return {}
