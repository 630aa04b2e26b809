"""Structured outputs: the form that an answer must have. Names and defaults are those of vLLM's ``StructuredOutputsParams``.

Knows how a form is asked for, not what any schema or grammar means: that is checked by the tokenizer process, and
enforced by the executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quintet.wire.errors import ErrorCode, RequestError

MAX_FORM_CHARS = 128 << 10
"""Of a schema, an expression, a grammar, or all choices together."""
MAX_COMPILED_BYTES = 4 * MAX_FORM_CHARS
"""Of what becomes of it."""
MAX_FORM_NESTING = 64
"""Lists and objects within each other in a schema."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, array_like=True, kw_only=True, omit_defaults=True):
    """What the whole answer must be. Exactly one of the first six is given."""

    json: str | bool | dict[str, Any] | None = None
    """JSON that this JSON schema allows."""
    regex: str | None = None
    """What this regular expression matches as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """What this grammar allows, in Lark's notation or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Any text, but for parts between tags, which have schemas of their own. JSON."""
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks between its parts."""
    disable_additional_properties: bool = False
    """JSON objects with the named properties alone, where a schema does not say otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression of what may stand between the parts of JSON."""
    compiled: str = ""
    """The same in words of the library that enforces it. Written by the tokenizer process, which drops all other fields."""
    calls: str = ""
    """A structural tag, as JSON: calls of tools that the answer may be instead."""

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        [kind] = self.kinds
        return kind

    @property
    def kinds(self) -> list[str]:
        """Those that are given: of a checked one, exactly one."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return [name for name in given if name == "json" or getattr(self, name) is not False]

    @property
    def is_one_form(self) -> bool:
        """Whether it says one thing, in the client's words or in the library's."""
        return len(self.kinds) + bool(self.compiled) == 1

    def checked(self) -> StructuredOutputsParams:
        """Return the normal form: JSON as text. Raises `RequestError` for what no such request can be."""
        try:
            given = msgspec.convert(list(msgspec.structs.asdict(self).values()), StructuredOutputsParams)
        except (msgspec.ValidationError, RecursionError) as error:
            raise _bad(f"is not as it must be: {_in_words(error)}") from None
        if self.compiled:
            raise _bad("holds `compiled`, which the server writes; leave it out")
        if given.calls:
            given = msgspec.structs.replace(given, calls=_json_text(given.calls, "calls"))
        kinds = given.kinds
        if len(kinds) != 1:
            sent = " and ".join(kinds) or "nothing"
            raise _bad(f"holds {sent}; it must hold exactly one of {', '.join(KINDS)}")
        is_json = kinds[0] in {"json", "json_object", "structural_tag"}
        for name in (
            "disable_any_whitespace",
            "disable_additional_properties",
            "whitespace_pattern",
            "calls",
        ):
            if getattr(given, name) and not is_json:
                raise _bad(f"holds {name} with {kinds[0]}; it says something of JSON only: leave it out")
        if is_json and kinds[0] != "json_object":
            text = _json_text(getattr(given, kinds[0]), kinds[0])
            return msgspec.structs.replace(given, **{kinds[0]: text})
        _check_texts(given, kinds[0])
        return given


def _check_texts(given: StructuredOutputsParams, kind: str) -> None:
    texts = given.choice or [] if kind == "choice" else [getattr(given, kind)]
    if not texts:
        raise _bad("holds no choice; give at least one")
    if kind == "choice" and "" in texts:
        raise _bad("has an empty text among its choices; each must have at least one character")
    if kind != "json_object" and (size := sum(map(len, texts))) > MAX_FORM_CHARS:
        raise _bad(f"holds {size} characters in {kind}; it must be at most {MAX_FORM_CHARS}")
    if given.whitespace_pattern is not None and len(given.whitespace_pattern) > MAX_FORM_CHARS:
        raise _bad(f"holds a whitespace_pattern of more than {MAX_FORM_CHARS} characters")


def _json_text(given: str | bool | dict[str, Any], kind: str) -> str:
    """Return JSON as text, and as short as it can be, once it is known to be bounded."""
    try:
        value = msgspec.json.decode(given) if isinstance(given, str) else given
        if _nesting(value) > MAX_FORM_NESTING:
            raise RecursionError
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        raise _bad(f"holds {kind} nested deeper than {MAX_FORM_NESTING} levels; make it flatter") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError, OverflowError) as error:
        raise _bad(f"holds {kind} that is not JSON: {error}") from None
    if not isinstance(value, dict | bool if kind == "json" else dict):
        raise _bad(f"holds {kind} that is no JSON object")
    if len(text) > MAX_FORM_CHARS:
        raise _bad(f"holds {len(text)} characters in {kind}; it must be at most {MAX_FORM_CHARS}")
    return text


def _nesting(value: object) -> int:
    """Return how many lists and objects lie within each other, or one more than are allowed."""
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
    """Turn msgspec's ``… - at `$[3]` `` into the name of the field."""
    what, _, where = str(error).partition(" - at `$[")
    index = where.split("]")[0]
    names = StructuredOutputsParams.__struct_fields__
    return f"{names[int(index)]}: {what}" if index.isdigit() else what


def _bad(what: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"{FIELD} {what}.", FIELD)
