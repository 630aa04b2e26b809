"""Structured outputs: the required form of an answer. Names and defaults are those of vLLM's ``StructuredOutputsParams``.

Only the form of the request is checked here. The tokenizer process compiles schemas and grammars; the executor
enforces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quintet.wire.errors import RequestError, invalid

MAX_FORM_CHARS = 128 << 10
"""Maximum size of a schema, an expression, a grammar, or all choices together."""
MAX_COMPILED_BYTES = 4 * MAX_FORM_CHARS
"""Maximum size of the compiled form."""
MAX_FORM_NESTING = 64
"""Maximum nesting of lists and objects in a schema."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
JSON_ONLY = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "calls")
"""Fields that apply to JSON only."""
FIELD = "structured_outputs"
PYTHON_TYPES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "list": "array",
}  # fmt: skip
"""JSON Schema's names of types, by the names in some tools' schemas."""


class StructuredOutputsParams(msgspec.Struct, array_like=True, kw_only=True, omit_defaults=True):
    """Required form of the whole answer. Exactly one of the first six is set."""

    json: str | bool | dict[str, Any] | None = None
    """JSON that conforms to this JSON schema."""
    regex: str | None = None
    """Text that this regular expression matches completely."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this grammar, in Lark's notation or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with schemas for the parts between tags. JSON."""
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks between its parts."""
    disable_additional_properties: bool = False
    """JSON objects with the named properties only, unless a schema allows others."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between parts of JSON."""
    compiled: str = ""
    """The form in the enforcing library's format. Set by the tokenizer process, which drops all other fields."""
    calls: str = ""
    """A structural tag, as JSON: tool calls that the answer may be instead."""

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is set."""
        [kind] = self.kinds
        return kind

    @property
    def kinds(self) -> list[str]:
        """Those of `KINDS` that are set; exactly one after checking."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return [name for name in given if name == "json" or getattr(self, name) is not False]

    def checked(self) -> StructuredOutputsParams:
        """Return the normal form: JSON as text. Raises `RequestError` for invalid combinations."""
        try:
            given = msgspec.convert(list(msgspec.structs.asdict(self).values()), StructuredOutputsParams)
        except (msgspec.ValidationError, RecursionError) as error:
            raise _bad(f"is invalid: {_in_words(error)}") from None
        if self.compiled:
            raise _bad("contains `compiled`, which only the server sets; remove it")
        if given.calls:
            given = msgspec.structs.replace(given, calls=_json_text(given.calls, "calls"))
        kinds = given.kinds
        if len(kinds) != 1:
            sent = " and ".join(kinds) or "nothing"
            raise _bad(f"contains {sent}; it must contain exactly one of {', '.join(KINDS)}")
        is_json = kinds[0] in {"json", "json_object", "structural_tag"}
        for name in JSON_ONLY:
            if getattr(given, name) and not is_json:
                raise _bad(f"contains {name} with {kinds[0]}; it applies to JSON only: remove it")
        if is_json and kinds[0] != "json_object":
            text = _json_text(getattr(given, kinds[0]), kinds[0])
            return msgspec.structs.replace(given, **{kinds[0]: text})
        _check_texts(given, kinds[0])
        return given


def _check_texts(given: StructuredOutputsParams, kind: str) -> None:
    texts = given.choice or [] if kind == "choice" else [getattr(given, kind)]
    if not texts:
        raise _bad("contains no choice; send at least one")
    if kind == "choice" and "" in texts:
        raise _bad("contains an empty choice; each must have at least one character")
    if kind != "json_object" and (size := sum(map(len, texts))) > MAX_FORM_CHARS:
        raise _bad(f"contains {size} characters in {kind}; it must be at most {MAX_FORM_CHARS}")
    if given.whitespace_pattern is not None and len(given.whitespace_pattern) > MAX_FORM_CHARS:
        raise _bad(f"contains a whitespace_pattern of more than {MAX_FORM_CHARS} characters")


def _json_text(given: str | bool | dict[str, Any], kind: str) -> str:
    """Return JSON as compact text, after checking its size and nesting."""
    try:
        value = msgspec.json.decode(given) if isinstance(given, str) else given
        if _nesting(value) > MAX_FORM_NESTING:
            raise RecursionError
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        raise _bad(f"contains {kind} nested deeper than {MAX_FORM_NESTING} levels; make it flatter") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError, OverflowError) as error:
        raise _bad(f"contains {kind} that is not JSON: {error}") from None
    if not isinstance(value, dict | bool if kind == "json" else dict):
        raise _bad(f"contains {kind} that is not a JSON object")
    if len(text) > MAX_FORM_CHARS:
        raise _bad(f"contains {len(text)} characters in {kind}; it must be at most {MAX_FORM_CHARS}")
    return text


def _nesting(value: object) -> int:
    """Return the nesting depth of lists and objects, or one more than the maximum."""
    depth, level = 0, [value]
    while level and depth <= MAX_FORM_NESTING:
        level = [inner for each in level for inner in _inner(each)]
        depth += bool(level)
    return depth


def _inner(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _in_words(error: Exception) -> str:
    """Convert msgspec's ``… - at `$[3]` `` to the field's name."""
    what, _, where = str(error).partition(" - at `$[")
    index = where.split("]")[0]
    names = StructuredOutputsParams.__struct_fields__
    return f"{names[int(index)]}: {what}" if index.isdigit() else what


def _bad(what: str) -> RequestError:
    return invalid(f"{FIELD} {what}.", FIELD)


def json_type_of(value: object) -> str:
    """Return JSON Schema's name of a value's type: ``number`` for integers too."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"
