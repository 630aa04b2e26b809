"""Errors of invalid JSON and of values with a wrong type: the field, its value and the allowed types."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from quintet.wire.errors import RequestError, invalid

BodyT = TypeVar("BodyT")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def decode_leniently(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Decode a body with numbers and booleans in strings. Raises `RequestError`."""
    try:
        return msgspec.json.decode(body, type=decoder.type, strict=False)
    except msgspec.ValidationError as error:
        raise explain(error, value_of(body, None)) from None
    except INVALID_JSON as error:
        if not body.strip():
            raise invalid("The request body is empty; send a JSON object.") from None
        raise not_json(error, body) from None


def not_json(error: Exception, body: bytes, name: str | None = None) -> RequestError:
    """Build the error for invalid JSON in the body, or in the named field."""
    what = f"The request body's {name}" if name else "The request body"
    hint = ""
    if _SURROGATE.search(body):
        hint = r" It holds \ud800 to \udfff escapes: these must come in pairs, each pair one character."
    return invalid(f"{what} is not valid JSON: {error}.{hint}", name)


def explain(error: msgspec.ValidationError, value: Json, prefix: str = "") -> RequestError:
    """Translate a validation error of msgspec on a value into one with the field and its value."""
    match = _PATH.match(str(error))
    assert match is not None, str(error)
    what, path = match["what"], match["path"] or ""
    missing = _MISSING.match(what)
    field = (prefix + path).lstrip(".")
    if missing:
        name = f"{field}.{missing['field']}" if field else missing["field"]
        return invalid(f"{name} is missing; it is required.", name)
    sent = msgspec.json.encode(_value_at(value, path)).decode()
    if len(sent) > 80:
        sent = sent[:77] + "..."
    if not field:
        return invalid(f"The request body is {sent}; send a JSON object.")
    what = what.replace("`", "").replace("Expected ", "").replace(" | null", "")
    expected, _, got = what.partition(", got ")
    return invalid(
        f"{field} is {sent}; it must be {expected}{f', not {got}' if got else ''}.", field.split("[")[0]
    )


def value_of(body: bytes, name: str | None) -> Json:
    """Decode JSON that failed a validation. Raises `RequestError` if it is also invalid."""
    try:
        value: Json = msgspec.json.decode(body)
    except INVALID_JSON as error:
        raise not_json(error, body, name) from None
    return value


def _value_at(value: Json, path: str) -> Json:
    for name, index in _STEP.findall(path):
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            break
    return value
