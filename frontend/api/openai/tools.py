"""``tools`` and ``tool_choice``: parsing of calls in the output, and constraints for required calls.

Required calls are enforced by structured output, with arguments that match the tools' schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.offered_tools import sent_tools, shown_tools
from quintet.frontend.api.openai.types import ChatBody, FunctionTool, Tool
from quintet.wire.config import ForcedCalls, ParsersConfig
from quintet.wire.errors import invalid
from quintet.wire.params import shown
from quintet.wire.structured import StructuredOutputsParams

TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
"""Choices without a name; the last one is Mistral's and Anthropic's."""
_NAME = re.compile(r"[\w.:/\-]{1,256}")
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref"}
_tools_decoder = msgspec.json.Decoder(list[Tool])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class AllowedTools(msgspec.Struct, kw_only=True):
    """``tool_choice.allowed_tools``: the tools that the model may call."""

    mode: str
    """auto or required."""
    tools: list[dict[str, msgspec.Raw]]
    """Each as in ``tool_choice``."""


_allowed_decoder = msgspec.json.Decoder(AllowedTools)


def check_tool_choice(body: ChatBody) -> None:
    """Reject an invalid tool_choice. Parses the tools only to remove those outside ``allowed_tools``.

    Some agents send Anthropic's objects, ``{"type": "auto"}``; they are translated to OpenAI's strings. Their other fields,
    such as a function without a name, have no effect.
    """
    choice = body.tool_choice
    kind = msgspec.json.decode(choice["type"]) if isinstance(choice, dict) and "type" in choice else choice
    if isinstance(kind, str) and kind in TOOL_CHOICES:
        choice = TOOL_CHOICES[kind]
    elif isinstance(choice, dict) and "allowed_tools" in choice and parse.json_of(body.tools):
        choice = _keep_allowed(body, choice["allowed_tools"])
    body.tool_choice = choice
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in {"auto", "required"}:
        raise invalid(
            f"tool_choice is {shown(choice)}; it must be 'none', 'auto', 'required' or an object naming a function.",
            "tool_choice",
        )
    if not parse.json_of(body.tools):
        raise invalid("tool_choice is set but tools is not; send the tools as well.", "tool_choice")


def _keep_allowed(body: ChatBody, encoded: msgspec.Raw) -> str:
    """Remove the tools that are not allowed; return the choice among the others."""
    allowed = parse.decode_part(encoded, _allowed_decoder, "tool_choice.allowed_tools")
    if allowed.mode not in ("auto", "required"):
        raise invalid(
            f"tool_choice.allowed_tools.mode is {shown(allowed.mode)}; it must be 'auto' or 'required'.",
            "tool_choice",
        )
    known = [tool.own_name for tool in sent_tools(body.tools, "tools")]
    wanted = {_named(each) for each in allowed.tools}
    missing = sorted(wanted.difference(known))
    if missing or not wanted:
        raise invalid(
            f"tool_choice.allowed_tools names {shown(missing[0]) if missing else 'none'}; it must name at least one of the "
            f"tools ({', '.join(name for name in known if name)}), and no others.",
            "tool_choice",
        )
    pairs = zip(known, _list_decoder.decode(parse.json_of(body.tools)), strict=True)
    body.tools = msgspec.Raw(msgspec.json.encode([tool for name, tool in pairs if name in wanted]))
    return allowed.mode


def required_functions(body: ChatBody) -> list[FunctionTool]:
    """Return the functions of which the output must call one; empty if a call is optional. The tools were checked.

    Also empty if no tool of the request can be offered to the model.
    """
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    tools = shown_tools(body.tools)
    if not tools:
        return []
    functions = [tool.function for tool in _tools_decoder.decode(tools)]
    if not isinstance(choice, str):
        name = _named(choice)
        known = [function.name for function in functions]
        functions = [function for function in functions if function.name == name][:1]
        if not functions:
            raise invalid(
                f"tool_choice names {shown(name)}; it must name one of the tools ({', '.join(known)}).",
                "tool_choice",
            )
    for function in functions:
        if _NAME.fullmatch(function.name) is None:
            raise invalid(
                f"tools has a function named {shown(function.name)}; a call can be required only if the name consists of "
                "letters, digits, _, ., :, / and -.",
                "tools",
            )
    return functions


def _named(choice: Mapping[str, msgspec.Raw]) -> str:
    try:
        kind = msgspec.json.decode(choice["type"], type=str) if "type" in choice else "function"
        if kind not in ("function", "custom", "tool"):
            raise KeyError(kind)
        tool = msgspec.json.decode(choice[kind], type=dict[str, msgspec.Raw]) if kind in choice else choice
        return msgspec.json.decode(tool["name"], type=str)
    except (KeyError, msgspec.MsgspecError):
        raise invalid(
            'tool_choice is an object; it must be {"type": "function", "function": {"name": …}}.',
            "tool_choice",
        ) from None


def forced_choice(name: str) -> dict[str, msgspec.Raw]:
    """Return the ``tool_choice`` that names a function."""
    return {"type": msgspec.Raw(b'"function"'), "function": msgspec.Raw(msgspec.json.encode({"name": name}))}


def form_of_calls(body: ChatBody, how: ForcedCalls) -> StructuredOutputsParams | None:
    """Return the constraint for required calls; None if a call is optional.

    It allows one call without ``parallel_tool_calls``, for a named function, or if the model's format has one call at most.
    """
    functions = required_functions(body)
    if not functions:
        return None
    is_one = how.is_single or body.parallel_tool_calls is False or body.tool_choice != "required"
    tags = [_named_call_tag(function.name, _object_schema(function), how) for function in functions]
    tag = _structural_tag(tags, how, is_one=is_one)
    pattern = body.guided_whitespace_pattern
    return StructuredOutputsParams(structural_tag=tag, whitespace_pattern=pattern).checked()


def form_or_calls(
    form: StructuredOutputsParams | None, body: ChatBody, parsers: ParsersConfig
) -> StructuredOutputsParams | None:
    """Extend a JSON constraint by optional calls, if the model may call tools.

    Arguments are any object, as without a constraint: a schema that cannot be enforced does not reject the request.
    """
    is_json = form is not None and form.kind in ("json", "json_object")
    tools = parse.json_of(body.tools)
    if (
        form is None
        or not is_json
        or not tools
        or not parsers.tools
        or body.tool_choice not in (None, "auto")
    ):
        return form
    named = [tool.function.name for tool in _tools_decoder.decode(tools)]
    names = [name for name in dict.fromkeys(named) if _NAME.fullmatch(name)]
    if not names:
        return form
    how = parsers.forced
    is_bare = (how.begin + how.call_begin).lstrip("[").startswith("{")
    if is_bare:
        tags = [_bare_call_tag(names, how)]
    else:
        tags = [_named_call_tag(name, {"type": "object"}, how) for name in names]
    tag = _structural_tag(tags, how, is_one=how.is_single or body.parallel_tool_calls is False)
    return msgspec.structs.replace(form, calls=tag)


def _tag(begin: str, schema: Mapping[str, object], end: str) -> dict[str, object]:
    """Return the tag of one call. ``schema``: of the text between ``begin`` and ``end``."""
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _named_call_tag(name: str, schema: Mapping[str, object], how: ForcedCalls) -> dict[str, object]:
    """Return the tag of a call of one function. ``schema``: of its arguments."""
    return _tag(how.call_begin + name + how.name_end, schema, how.call_end)


def _bare_call_tag(names: Sequence[str], how: ForcedCalls) -> dict[str, object]:
    """Return the tag of a call in bare JSON: the schema distinguishes it from the final JSON."""
    key = "parameters" if "parameters" in how.name_end else "arguments"
    properties = {"name": {"enum": names}, key: {"type": "object"}}
    required = {"required": ["name", key], "additionalProperties": False}
    return _tag("", {"type": "object", "properties": properties, **required}, "")


def _structural_tag(tags: Sequence[Mapping[str, object]], how: ForcedCalls, *, is_one: bool) -> str:
    """Return the tag of one or more calls."""
    calls: dict[str, object] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": how.separator,
        "at_least_one": True,
        "stop_after_first": is_one,
    }
    before, after = ({"type": "const_string", "value": value} for value in (how.begin, how.end))
    elements = [before, calls, after] if how.begin or how.end else [calls]
    return msgspec.json.encode({"format": {"type": "sequence", "elements": elements}}).decode()


def _object_schema(function: FunctionTool) -> dict[str, object]:
    """Return the schema of a function's arguments: an object; declared properties exclude others."""
    encoded = parse.json_of(function.parameters)
    schema = msgspec.json.decode(encoded) if encoded else None
    if not isinstance(schema, dict):
        return {"type": "object"}
    found = {"type": "object", **schema}
    found.pop("nullable", None)  # arguments are never null
    if (
        "properties" in found and not found.keys() & _COMBINED
    ):  # in a combination, properties of one branch would be additional ones of another
        _close(found)
    return found


def _close(schema: dict[str, object]) -> None:
    """Forbid properties that the schema does not name. Required ones without a schema take any value."""
    if "additionalProperties" in schema:
        return
    properties, required = schema["properties"], schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        schema["properties"] = properties | dict.fromkeys(missing, True)
    schema["additionalProperties"] = False
