"""Structured output: ``response_format``, ``structured_outputs``, and their names in other servers.

Each is enforced or rejected; none is dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.frontend.api.openai.types import FormFields, RawField, ResponseFormat
from quintet.wire.errors import RequestError, invalid
from quintet.wire.params import shown
from quintet.wire.structured import FIELD, StructuredOutputsParams

FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "json_schema", "value"),
    "json_schema": ("json_schema", "schema", "value"),
    "structural_tag": ("structures", "triggers", "format"),
    "regex": ("regex", "pattern", "value"),
    "grammar": ("grammar", "value"),
}
"""Types of ``response_format``, and the fields that may hold their content."""
ALIASES = {"json": "json_object"}
"""TGI's names of types."""
FIELDS = ("json_schema", "schema", "value", "regex", "pattern", "grammar", "structures", "triggers", "format")
"""Fields of ``response_format``, without its type."""
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "regex": "regex",
    "regex_pattern": "regex",
    "ebnf": "grammar",
    "grammar_string": "grammar",
}
"""Field names of older clients and other servers, and the current ones."""
NESTED = ("extra_body", "nvext")
"""Fields that may contain the others."""
SCHEMA_WORDS = frozenset(
    {
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "enum",
        "const",
        "$defs",
        "definitions",
    }
)
"""Keys of a schema, which may also have a key of `NAMING_WORDS`."""
NAMING_WORDS = frozenset({"schema", "name", "strict"})
"""Keys of an object with a schema in ``schema``, and not of a schema."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """``structured_outputs``: exactly one of the first six fields."""

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    calls: str | None = None
    """Structural tag of the calls that the answer may be instead of JSON, as `/render` writes it."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``. Enforced regardless of ``strict``; declared properties exclude others."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


def form_of(body: FormFields) -> StructuredOutputsParams | None:
    """Return the normalized constraint; None for free text. Raises `RequestError` with the body's field."""
    for name, form in _requested(body).items():
        try:
            return form.checked()
        except RequestError as error:
            raise invalid(name + error.message.removeprefix(FIELD), name) from None
    return None


def form_field(body: FormFields) -> str | None:
    """Return the field with the constraint; None for free text. Raises `RequestError`."""
    return next(iter(_requested(body)), None)


def _requested(body: FormFields) -> dict[str, StructuredOutputsParams]:
    """Return the constraint by its field; one at most. Raises `RequestError`."""
    requested: dict[str, StructuredOutputsParams] = {}
    if body.response_format is not None and (form := _of_format(body.response_format)) is not None:
        requested["response_format"] = form
    if _was_sent(body.structured_outputs):
        given = _decoded(body.structured_outputs, StructuredOutputs, FIELD)
        requested[FIELD] = StructuredOutputsParams(
            **msgspec.structs.asdict(given) | {"calls": given.calls or ""}
        )
    if body.grammar_lazy:
        raise invalid(
            "grammar_lazy is true, but grammars always apply from the first token; leave it out.",
            "grammar_lazy",
        )
    for name, kind in GUIDED.items():
        raw = getattr(body, name)
        if _has_content(raw):
            value = _decoded(raw, Any, name)
            pattern = body.guided_whitespace_pattern
            requested[name] = StructuredOutputsParams(**{kind: value}, whitespace_pattern=pattern)
    if _has_content(body.json_schema):
        requested["json_schema"] = _of_schema(body.json_schema, "json_schema")
    if _has_content(body.grammar) and (form := _of_grammar(body.grammar)) is not None:
        requested["grammar"] = form
    for name in NESTED:
        raw = getattr(body, name)
        if raw is not msgspec.UNSET and bytes(raw).startswith(b"{"):
            nested = _requested(_decoded(raw, FormFields, name))
            requested |= {f"{name}.{field}": form for field, form in nested.items()}
    if len(requested) > 1:
        raise invalid(
            f"{' and '.join(requested)} were sent; only one output format is allowed, so send one of them.",
            FIELD,
        )
    return requested


def _of_grammar(raw: RawField) -> StructuredOutputsParams | None:
    """Parse ``grammar``: a grammar as in llama.cpp, or TGI's object with a type."""
    given = _decoded(raw, str | dict[str, msgspec.Raw], "grammar")
    if isinstance(given, str):
        return StructuredOutputsParams(grammar=given)
    return _of_format(_decoded(raw, ResponseFormat, "grammar"), "grammar")


def _of_format(given: ResponseFormat, name: str = "response_format") -> StructuredOutputsParams | None:
    kind = ALIASES.get(given.type, given.type)
    if kind not in FORMATS:
        raise invalid(f"{name}.type is {shown(given.type)}; it must be one of {', '.join(FORMATS)}.", name)
    sent = [field for field in FIELDS if _was_sent(getattr(given, field))]
    unexpected = [field for field in sent if field not in FORMATS[kind]]
    if unexpected or (kind != "structural_tag" and len(sent) > 1):
        allowed = " or ".join(FORMATS[kind]) or "nothing"
        raise invalid(
            f"{name} has {' and '.join(sent)} with the type {given.type}; allowed with it: {allowed}.",
            name,
        )
    if kind == "text":
        return None
    if kind == "structural_tag":
        parts = {field: _decoded(getattr(given, field), Any, f"{name}.{field}") for field in sent}
        return StructuredOutputsParams(structural_tag=parts)
    if not sent:
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        raise invalid(f"{name}.{FORMATS[kind][0]} is missing; it is required.", name)
    field = f"{name}.{sent[0]}"
    raw: RawField = getattr(given, sent[0])
    if kind in {"regex", "grammar"}:
        return StructuredOutputsParams(**{kind: _decoded(raw, str, field)})
    form = _of_schema(raw, field)
    return (
        StructuredOutputsParams(json_object=True)
        if kind == "json_object" and form.json in ({}, True)
        else form
    )


def _of_schema(raw: RawField, name: str) -> StructuredOutputsParams:
    """Parse a schema: an object, text, or an object with a name and a schema."""
    given = _decoded(raw, dict[str, Any] | bool | str, name)
    if isinstance(given, str):
        given = _decoded(msgspec.Raw(given.encode()), dict[str, Any] | bool, name)
    if isinstance(given, dict) and given.keys() & NAMING_WORDS and not given.keys() & SCHEMA_WORDS:
        given = _convert(given, JsonSchemaFormat, name).schema
    return StructuredOutputsParams(json=given, disable_additional_properties=True)


def _was_sent(raw: RawField) -> bool:
    return raw is not msgspec.UNSET and bytes(raw) != b"null"


def _has_content(raw: RawField) -> bool:
    """Return whether a field beside the messages was sent. Web interfaces send an empty text for none."""
    return raw is not msgspec.UNSET and bytes(raw) not in {b"null", b'""'}


def _decoded(raw: RawField, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(bytes(raw), type=kind)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise _invalid_value(error, name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"{name} is not valid JSON: {error}.", name.split(".", maxsplit=1)[0]) from None


def _convert(value: dict[str, Any], kind: type[JsonSchemaFormat], name: str) -> JsonSchemaFormat:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid_value(error, name) from None


def _invalid_value(error: msgspec.ValidationError, name: str) -> RequestError:
    return invalid(f"{name} is invalid: {str(error).replace('`', '')}.", name.split(".", maxsplit=1)[0])
