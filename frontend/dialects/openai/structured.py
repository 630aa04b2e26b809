"""The form that a body asks its answer to have: ``response_format``, ``structured_outputs``, or the older ``guided_*``."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from quintet.frontend.dialects.openai.types import GenerationBody, RawField, ResponseFormat
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import shown
from quintet.wire.structured import FIELD, StructuredOutputsParams

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Names that older clients send, and what they are called now."""
_forms_of = attrgetter("response_format", "structured_outputs", *GUIDED)
_NO_FORM = (None, *[msgspec.UNSET] * (1 + len(GUIDED)))


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """``structured_outputs``: exactly one of the first six."""

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``. Enforced, ``strict`` or not; an object that names properties has no others."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


def form_of(body: GenerationBody) -> StructuredOutputsParams | None:
    """Return the form in its normal form; None where any text will do. Raises `RequestError` naming the body's field."""
    if _forms_of(body) == _NO_FORM:  # as a rule, and every request comes by
        return None
    asked: dict[str, StructuredOutputsParams] = {}
    if body.response_format is not None and (form := _of_format(body.response_format)) is not None:
        asked["response_format"] = form
    if _was_sent(body.structured_outputs):
        given = _decoded(body.structured_outputs, StructuredOutputs, FIELD)
        asked[FIELD] = StructuredOutputsParams(**msgspec.structs.asdict(given))
    pattern = body.guided_whitespace_pattern
    for name, kind in GUIDED.items():
        raw = getattr(body, name)
        if _was_sent(raw):
            value = _decoded(raw, Any, name)
            asked[name] = StructuredOutputsParams(**{kind: value}, whitespace_pattern=pattern)
    if len(asked) > 1:
        raise _bad(f"{' and '.join(asked)} were sent; an answer has one form: send one of them.", FIELD)
    for name, form in asked.items():
        try:
            return form.checked()
        except RequestError as error:
            raise _bad(name + error.message.removeprefix(FIELD), name) from None
    return None


def _of_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            name = "response_format.json_schema"
            if not _was_sent(given.json_schema):
                raise _bad(f"{name} is missing; it is required.", "response_format")
            schema = _decoded(given.json_schema, JsonSchemaFormat, name).schema
            return StructuredOutputsParams(json=schema, disable_additional_properties=True)
        case "structural_tag":
            parts = {name: getattr(given, name) for name in ("structures", "triggers", "format")}
            sent = {name: _decoded(raw, Any, name) for name, raw in parts.items() if _was_sent(raw)}
            return StructuredOutputsParams(structural_tag=sent)
    raise _bad(
        f"response_format.type is {shown(given.type)}; it must be one of {', '.join(FORMATS)}.",
        "response_format",
    )


def _was_sent(raw: RawField) -> bool:
    return raw is not msgspec.UNSET and bytes(raw) != b"null"


def _decoded(raw: RawField, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(bytes(raw), type=kind)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise _bad(
            f"{name} is not as it must be: {str(error).replace('`', '')}.", name.split(".", maxsplit=1)[0]
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"{name} is not valid JSON: {error}.", name.split(".", maxsplit=1)[0]) from None


def _bad(message: str, param: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, message, param)
