"""Rewrite rules for the keywords of one JSON schema: drop those without effect, replace unsupported ones by supported ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from quintet.tokenizer_proc.notations.regexes import as_rust
from quintet.wire.structured import PYTHON_TYPES

Schema = dict[str, Any]

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that the library enforces."""
TIMES = frozenset({"date-time", "time"})
"""Formats that require a time zone, which patterns beside them may exclude, as zod's of times do."""
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
})  # fmt: skip
APPLICATORS = frozenset({
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas",
})  # fmt: skip
"""Keys with schemas that apply to the same value."""
ROOT_KEYWORDS = {"$schema", "$id", "$defs", "definitions"}
"""Keys that references expect in the outermost schema."""
MAX_NAME_LENGTH = 1000
MAX_EXCLUSIVE = 20
"""Branches of a ``oneOf`` that each require another property."""
TYPES = {"null", "boolean", "string", "integer", "number", "array", "object"}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_INTEGER, MAX_NUMBER = 1 << 62, 1e18
"""Largest bounds of integers and numbers that the library supports."""
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
WITHOUT_LOOKAROUND = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
"""Patterns of zod (e-mail addresses, durations) and Pydantic (decimals), and equivalent ones that the library supports."""
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3-7]|draft/20(?:19-09|20-12))/schema#?")
_DAY, _CLOCK = (
    r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])",
    r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?",
)
_NAME_FORMATS = {
    "uuid": r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": rf"^{_DAY}$",
    "date-time": rf"^{_DAY}T{_CLOCK}(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)$",
}
"""Patterns of names with a format: of Pydantic's dictionaries with keys of these types."""


def is_anything(schema: Any) -> bool:
    """Return whether a schema allows all values."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _drop_annotations(schema: Schema) -> None:
    declared = schema.get("format")
    if isinstance(declared, str) and (declared not in FORMATS or (declared in TIMES and "pattern" in schema)):
        del schema["format"]
    if schema.get("uniqueItems") is False or _at_most_one(schema):
        schema.pop("uniqueItems", None)
    if schema.get("not") is False:
        del schema["not"]
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        named = schema.get(key)
        if isinstance(named, dict) and all(each == [] or is_anything(each) for each in named.values()):
            del schema[key]


def _usual_dialect(schema: Schema) -> None:
    """Write a draft's URI as the draft does. The library cannot fetch other dialects, such as OpenAPI's."""
    dialect = schema.pop("$schema", None)
    if isinstance(dialect, str) and (match := _DIALECT.fullmatch(dialect)) is not None:
        draft = match[1]
        schema["$schema"] = (
            f"http://json-schema.org/{draft}/schema#"
            if draft.startswith("draft-")
            else f"https://json-schema.org/{draft}/schema"
        )


def _usual_types(schema: Schema) -> None:
    """Write types by JSON's names: Gemini's schemas have ``OBJECT``, and those of some tools ``str`` and ``any``."""
    declared = schema.get("type")
    if "any" in as_list(declared) or declared == "":
        del schema["type"]
    elif isinstance(declared, str):
        schema["type"] = _usual_type(declared)
    elif isinstance(declared, list):
        schema["type"] = [_usual_type(each) for each in declared]


def _usual_type(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    usual = PYTHON_TYPES.get(name.lower(), name.lower())
    return usual if usual in TYPES else name


def _usual_objects(schema: Schema) -> None:
    """Replace an empty list by an empty object, as PHP writes both alike. Drop the boolean ``required`` of draft 3."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if schema.get(key) == []:
            schema[key] = {}
    if isinstance(schema.get("required"), bool) or schema.get("required") == {}:
        del schema["required"]


def _usual_numbers(schema: Schema) -> None:
    """Write whole counts as integers, and narrow bounds that the library does not support (``int64``, ``double``)."""
    for key in COUNTS:
        count = schema.get(key)
        is_text = isinstance(count, str) and count.isdecimal() and len(count) < 10  # Gemini's 64-bit integers
        if count is not None and (is_text or (isinstance(count, float) and count.is_integer())):
            schema[key] = int(count)
    most = MAX_NUMBER if _has_type(schema, "number") else MAX_INTEGER
    for keys, sign in ((("minimum", "exclusiveMinimum"), -1), (("maximum", "exclusiveMaximum"), 1)):
        for key in keys:
            bound = schema.get(key)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and sign * bound > most:
                schema[key] = sign * most


def _usual_reference(schema: Schema) -> None:
    """Encode the characters of an identifier or reference that URIs do not allow: ``#/$defs/List[int]``.

    Drop identifiers that are only a fragment, as generators write the path of each property. References do not use them.
    """
    if str(schema.get("$id")).startswith("#"):
        del schema["$id"]
    for key in ("$id", "$ref"):
        reference = schema.get(key)
        if isinstance(reference, str):
            parts = reference.split("#", maxsplit=1)
            schema[key] = "#".join(quote(part, safe="/~!$&'()*+,;=:@?%-._") for part in parts)


def _plain_pattern(schema: Schema) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = WITHOUT_LOOKAROUND.get(pattern) or as_rust(pattern)
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        plain = {as_rust(name): inner for name, inner in by_pattern.items()}
        schema["patternProperties"] = plain if len(plain) == len(by_pattern) else by_pattern


def _at_most_one(schema: Schema) -> bool:
    most = schema.get("maxItems")
    return isinstance(most, int) and most <= 1


def _drop_conditions(schema: Schema) -> None:
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    for key in ("then", "else"):
        if is_anything(schema.get(key)):
            del schema[key]
    if not {"then", "else"} & schema.keys():
        schema.pop("if", None)


def _plain_contains(schema: Schema) -> None:
    """Drop ``contains`` without effect. If it matches all elements, convert its bounds to bounds of the length."""
    if "contains" in schema and (schema.get("minContains") != 0 or "maxContains" in schema):
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        lengths = [schema.get(key, 0) for key in ("minItems", "maxItems")]
        are_counts = all(type(each) is int for each in (least, 0 if most is None else most, *lengths))
        if not is_anything(schema["contains"]) or not are_counts:
            return
        schema["minItems"] = max(least, lengths[0])
        if most is not None:
            schema["maxItems"] = min(most, schema.get("maxItems", most))
    for key in ("contains", "minContains", "maxContains"):
        schema.pop(key, None)


def _plain_unevaluated(schema: Schema) -> None:
    """Replace ``unevaluated…`` by ``additionalProperties`` and ``items`` if no other schema evaluates the value."""
    for key, plainer in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key not in schema:
            continue
        if is_anything(schema[key]) or (plainer in schema and not isinstance(schema[plainer], list)):
            del schema[key]
        elif not APPLICATORS & schema.keys() and plainer not in schema and "contains" not in schema:
            schema[plainer] = schema.pop(key)


def plain_names(schema: Schema, names: Any) -> None:
    """Replace ``propertyNames`` by ``properties`` or ``patternProperties``.

    ``names`` is its schema, with a reference resolved.
    """
    if names is None:
        return
    if is_anything(names) or _allows_names(names):
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or "patternProperties" in schema or not _has_type(names, "string"):
        return
    rest = schema.get("additionalProperties", True)
    declared = schema.get("properties", {})
    keywords = names.keys() - ANNOTATIONS - {"type"}
    allowed = as_list(names.get("enum", names.get("const")))
    if keywords in ({"enum"}, {"const"}) and isinstance(declared, dict):
        strings = [name for name in allowed if isinstance(name, str)]
        schema["properties"] = {name: declared.get(name, rest) for name in dict.fromkeys(strings)}
    elif not declared and (pattern := _pattern_of(names, keywords)) is not None:
        schema["patternProperties"] = {pattern: rest}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _pattern_of(names: Schema, keywords: set[str]) -> str | None:
    """Return the regular expression of the allowed names; None if the schema has other constraints."""
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if keywords == {"format"}:
        return _NAME_FORMATS.get(str(names["format"]))
    least, most = names.get("minLength", 0), names.get("maxLength", MAX_NAME_LENGTH)
    is_length = keywords <= {"minLength", "maxLength"} and type(least) is type(most) is int
    if not is_length or not 0 <= least <= most <= MAX_NAME_LENGTH:
        return None
    return rf"^[\s\S]{{{least},{most if 'maxLength' in names else ''}}}$"


def _allows_names(schema: Any) -> bool:
    """Return whether the schema allows all property names, which are strings."""
    return (
        isinstance(schema, dict) and schema.keys() <= ANNOTATIONS | {"type"} and _has_type(schema, "string")
    )


def _has_type(schema: Schema, name: str) -> bool:
    declared = schema.get("type", name)
    return declared == name or (isinstance(declared, list) and name in declared)


def close(schema: Schema) -> None:
    """Forbid properties that the schema does not name. Required ones without a schema take any value.

    A schema with properties but no type allows objects only.
    """
    if not {"type", "enum", "const"} & schema.keys():
        schema["type"] = "object"
    if "additionalProperties" in schema:
        return
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        schema["properties"] = properties | dict.fromkeys(missing, True)
    schema["additionalProperties"] = False


def _plain_not(schema: Schema) -> None:
    """Remove the types in ``not`` from ``type``."""
    refused, declared = schema.get("not"), schema.get("type")
    if not isinstance(refused, dict) or refused.keys() - ANNOTATIONS != {"type"} or declared is None:
        return
    allowed, taken = as_list(declared), as_list(refused["type"])
    if not all(isinstance(each, str) and each in TYPES for each in taken):
        return
    if "integer" in taken and "number" in allowed:
        return
    left = [each for each in allowed if each not in taken and not (each == "integer" and "number" in taken)]
    if left:
        del schema["not"]
        schema["type"] = left[0] if len(left) == 1 else left


def _drop_branches(schema: Schema) -> None:
    """Drop ``anyOf`` branches with lookaround patterns if others remain. Pydantic writes decimals this way."""
    branches = schema.get("anyOf")
    if isinstance(branches, list):
        left = [each for each in branches if not _has_lookaround(each)]
        schema["anyOf"] = left or branches


def _has_lookaround(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return isinstance(pattern, str) and any(mark in pattern for mark in ("(?=", "(?!", "(?<=", "(?<!"))


def _plain_all_of(schema: Schema) -> None:
    """Replace ``allOf`` of one schema by that schema. Pydantic and OpenAPI add annotations to references this way."""
    branches = schema.get("allOf")
    if schema.keys() - ANNOTATIONS - ROOT_KEYWORDS - {"nullable"} != {"allOf"} or not isinstance(
        branches, list
    ):
        return
    branches = [each for each in branches if not is_anything(each)] or branches
    if len(branches) == 1 and isinstance(branches[0], dict) and not ROOT_KEYWORDS & branches[0].keys():
        del schema["allOf"]
        schema |= {key: value for key, value in branches[0].items() if key not in schema}


def _exclude_others(schema: Schema) -> None:
    """Replace ``oneOf`` of branches that require one property each by ``anyOf``: each branch excludes the others' property."""
    branches = schema.get("oneOf")
    if schema.get("type") != "object" or "anyOf" in schema or not isinstance(branches, list):
        return
    required = [each.get("required") if isinstance(each, dict) else None for each in branches]
    names = [
        each[0] for each in required if isinstance(each, list) and len(each) == 1 and isinstance(each[0], str)
    ]
    is_plain = all(isinstance(each, dict) and each.keys() - ANNOTATIONS == {"required"} for each in branches)
    if is_plain and len(set(names)) == len(branches) <= MAX_EXCLUSIVE:
        del schema["oneOf"]
        schema["anyOf"] = [
            {"required": [name], "properties": {other: False for other in names if other != name}}
            for name in names
        ]


def _allow_null(schema: Schema) -> None:
    """Replace OpenAPI's ``nullable``: null becomes a type and a value of ``enum``, or a branch of ``anyOf``."""
    if schema.pop("nullable", None) is not True:
        return
    if APPLICATORS & schema.keys():
        kept = {key: schema.pop(key) for key in ROOT_KEYWORDS & schema.keys()}
        inner = dict(schema)
        schema.clear()
        schema |= {**kept, "anyOf": [inner, {"type": "null"}]}
        return
    if "type" in schema:
        declared = as_list(schema["type"])
        schema["type"] = declared if "null" in declared else [*declared, "null"]
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


Rules = tuple[Callable[[Schema], None], ...]

RULES: Rules = (
    _plain_all_of,  # first: others read the keywords of the inner schema
    _usual_dialect,
    _usual_types,
    _usual_objects,
    _usual_numbers,
    _usual_reference,
    _plain_pattern,
    _plain_unevaluated,  # before conditions: those without effect also determine the evaluated properties
    _drop_annotations,
    _drop_conditions,
    _plain_contains,
    _plain_not,
    _drop_branches,
    _exclude_others,
    _allow_null,  # last: other rules read the types
)
