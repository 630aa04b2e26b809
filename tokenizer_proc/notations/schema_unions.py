"""Rewriting of unions with disjoint branches, and of arrays with unique elements, in JSON schemas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.tokenizer_proc.nesting_depth import target_of
from quintet.tokenizer_proc.notations.schema_keywords import ANNOTATIONS, TYPES, Schema, as_list
from quintet.wire.structured import json_type_of

MAX_ORDERS = 100
"""Permutations enumerated for a set; enough for four values."""
MAX_SUBSETS = 128
"""Subsets enumerated for a larger set, each in the schema's order; enough for seven values."""
MAX_BRANCHES = 64
"""Branches of a ``oneOf`` that is analyzed."""
MAX_ANALYZED = 100_000
"""Schemas and values that the analysis of one root schema visits; a value counts once per reference to it."""
MAX_LEVELS = 32
"""Nested ``anyOf`` of enumerated values, with references resolved: references may be cyclic."""


@dataclass(slots=True)
class Root:
    """The root of a schema, and the remaining effort of their analysis."""

    schema: Schema
    num_left: int = MAX_ANALYZED


def resolved(schema: Any, root: Root) -> Any:
    """Resolve a schema that has only a reference and annotations; return other schemas unchanged."""
    for _ in range(8):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - ANNOTATIONS != {"$ref"}:
            return schema
        reference = schema["$ref"]
        schema = target_of(root.schema, reference) if isinstance(reference, str) else None
    return None


def enumerated(schema: Any, root: Root) -> Any:
    """Resolve a schema, and write a union of values as ``enum``; return other schemas unchanged."""
    schema = resolved(schema, root)
    is_union = isinstance(schema, dict) and "anyOf" in schema
    values = _values(schema, root, is_exact=True) if is_union else None
    return schema if values is None else {"enum": values}


def require_discriminator(schema: Schema, root: Root) -> None:
    """Add the discriminator property (OpenAPI's ``discriminator``) to ``required`` in each branch of a union.

    Pydantic omits it from ``required`` if it has a default. A value without it matches several branches or none.
    """
    discriminator, branches = schema.get("discriminator"), schema.get("oneOf", schema.get("anyOf"))
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if not isinstance(name, str) or not isinstance(branches, list):
        return
    for branch in _objects_of(branches, root):
        properties = branch.get("properties")
        if not isinstance(properties, dict) or _values(properties.get(name), root) is None:
            continue
        required = branch.setdefault("required", [])
        if isinstance(required, list) and name not in required:
            required.append(name)


def _objects_of(branches: list[Any], root: Root) -> Iterator[Schema]:
    """Yield the schemas of a union, with references resolved and unions in it included."""
    waiting, seen = list(branches), set[int]()
    while waiting and root.num_left > 0:
        root.num_left -= 1
        branch = resolved(waiting.pop(), root)
        if isinstance(branch, dict) and id(branch) not in seen:
            seen.add(id(branch))
            yield branch
            inner = branch.get("oneOf", branch.get("anyOf"))
            waiting += inner if isinstance(inner, list) else ()


def write_out_set(schema: Schema, root: Root, most: int) -> int:
    """Replace an array of unique elements from few values by an enumeration; return the number of alternatives.

    Up to four values are enumerated in all orders. Five to seven values are enumerated only in the schema's order, which
    is stricter than the schema.
    """
    if schema.get("uniqueItems") is not True or schema.get("type") not in ("array", ["array"]):
        return 0
    if {"prefixItems", "anyOf", "additionalItems"} & schema.keys():
        return 0
    values = _values(schema.get("items"), root, is_exact=True)
    if values is None or len(values) > MAX_SUBSETS:
        return 0
    least, longest = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if type(least) is not int or type(longest) is not int:
        return 0
    chosen = _arrangements(values, range(max(least, 0), min(longest, len(values)) + 1))
    if not chosen or len(chosen) > most:
        return 0
    for key in ("uniqueItems", "items", "minItems", "maxItems", "type"):
        schema.pop(key, None)
    schema["anyOf"] = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in one],
            "items": False,
            "minItems": len(one),
            "maxItems": len(one),
        }
        for one in chosen
    ]
    return len(chosen)


def _arrangements(values: Sequence[Any], lengths: Iterable[int]) -> list[tuple[Any, ...]]:
    """Return the sequences of unique values; empty if there are too many."""
    for arranged, most in ((itertools.permutations, MAX_ORDERS), (itertools.combinations, MAX_SUBSETS)):
        everything = itertools.chain.from_iterable(arranged(values, length) for length in lengths)
        found = list(itertools.islice(everything, most + 1))
        if len(found) <= most:
            return found
    return []


def disjoin(schema: Schema, root: Root) -> None:
    """Replace ``oneOf`` by ``anyOf`` if no value matches two of its branches."""
    branches = schema.get("oneOf")
    if "anyOf" in schema or not isinstance(branches, list) or not 0 < len(branches) <= MAX_BRANCHES:
        return
    facts = [_facts_of(each, root) for each in branches if root.num_left > 0]
    if len(facts) == len(branches) and all(
        one.excludes(other) for one, other in itertools.combinations(facts, 2)
    ):
        schema["anyOf"] = schema.pop("oneOf")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Properties of the values that a schema allows."""

    types: frozenset[str]
    values: frozenset[bytes] | None
    """All values as JSON; None if they cannot be enumerated."""
    tags: dict[str, frozenset[bytes]]
    """Values of required properties."""

    def excludes(self, other: _Facts) -> bool:
        """Return whether no value matches both."""
        if not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        is_object = self.types & other.types == {"object"}
        return is_object and any(
            not values & other.tags[name] for name, values in self.tags.items() if name in other.tags
        )


def _facts_of(branch: Any, root: Root) -> _Facts:
    schema = resolved(branch, root)
    everything = frozenset(TYPES)
    if not isinstance(schema, dict):
        return _Facts(everything, None, {})
    declared = schema.get("type")
    types = (
        everything
        if declared is None
        else frozenset(each for each in as_list(declared) if isinstance(each, str))
    )
    if "number" in types:
        types |= {"integer"}
    values = _values(schema, root)
    required, properties = schema.get("required"), schema.get("properties")
    tags = {}
    if isinstance(required, list) and isinstance(properties, dict):
        found = {name: _values(properties.get(name), root) for name in required if isinstance(name, str)}
        tags = {name: _as_json(of_name) for name, of_name in found.items() if of_name is not None}
    return _Facts(types, None if values is None else _as_json(values), tags)


def _as_json(values: Iterable[Any]) -> frozenset[bytes]:
    return frozenset(map(_json_of, values))


def _json_of(value: Any) -> bytes:
    """Encode a value so that equal values have equal encodings: in JSON Schema 1.0 equals 1."""
    text = msgspec.json.encode(value, order="deterministic")
    return re.sub(rb"(?<=\d)\.0\b", b"", text) if isinstance(value, float) else text


def _values(schema: Any, root: Root, *, is_exact: bool = False, level: int = 0) -> list[Any] | None:
    """Return the values that a schema allows, or a superset unless ``is_exact``; None if they cannot be enumerated."""
    root.num_left -= 1
    if level > MAX_LEVELS or root.num_left < 0:
        return None
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    keywords = schema.keys() - ANNOTATIONS
    if is_exact and (len(keywords - {"type"}) > 1 or not keywords <= {"type", "const", "enum", "anyOf"}):
        return None
    if "const" in schema:
        found = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        found = schema["enum"]
    elif isinstance(schema.get("anyOf"), list) and "type" not in schema:
        found = []
        for branch in schema["anyOf"]:
            values = _values(branch, root, is_exact=is_exact, level=level + 1)
            if values is None:
                return None
            found += values
    elif schema.get("type") in ("null", "boolean"):
        found = [None] if schema["type"] == "null" else [False, True]
    else:
        return None
    root.num_left -= len(found)
    if root.num_left < 0:
        return None
    if is_exact and "type" in schema and not all(_is_of(value, as_list(schema["type"])) for value in found):
        return None
    return list({_json_of(value): value for value in found}.values())


def _is_of(value: Any, types: list[Any]) -> bool:
    """Return whether a JSON value has one of these types."""
    return json_type_of(value) in types or (type(value) is int and "integer" in types)
