"""Tools of every API, translated to the functions that chat templates show to the model.

Agents also send freeform tools, shells, namespaces, tool searches and server-side tools. A tool that the client runs, or
one with a name and a schema, is offered as a function. Every other tool is considered server-side: skipped and logged.

`Translation` has the additions to a `ChatBody` translated from another API: error locations and deferred tools.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.types import FunctionTool, RawField
from quintet.wire.errors import invalid
from quintet.wire.params import shown

CallKind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]
"""Kind of a call, by its tool's type in the Responses API."""

SERVER_TOOLS = (
    "web_search",
    "web_fetch",
    "file_search",
    "code_interpreter",
    "code_execution",
    "image_generation",
    "mcp",
    "computer",
    "tool_search",
    "x_search",
    "advisor",
    "programmatic_tool_calling",
)
"""Type prefixes of server-side tools."""
SEARCH = "tool_search"
NO_ARGUMENTS = {"type": "object", "properties": {}}
TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
PREDEFINED_TOOLS: dict[CallKind, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Run a command on the user's machine.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": TEXT, "description": "The program and its arguments."},
                "workdir": TEXT,
                "timeout_ms": NUMBER,
                "env": {"type": "object", "additionalProperties": TEXT},
            },
            "required": ["command"],
        },
    ),
    "shell": (
        "Run shell commands on the user's machine.",
        {
            "type": "object",
            "properties": {
                "commands": {"type": "array", "items": TEXT, "description": "Command lines of the shell."},
                "timeout_ms": NUMBER,
                "max_output_length": {**NUMBER, "description": "Characters of output to return."},
            },
            "required": ["commands"],
        },
    ),
    "apply_patch": (
        "Create, update or delete a file.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": TEXT,
                "diff": {**TEXT, "description": "A diff in V4A form. Absent for delete_file."},
            },
            "required": ["type", "path"],
        },
    ),
}
"""Client-side tools of the Responses API with a type but no schema: description and parameters."""
_COMMANDS = ["view", "create", "str_replace", "insert"]
_FILE_CHANGE: dict[str, Any] = {
    "path": TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
    "file_text": TEXT,
    "old_str": TEXT,
    "new_str": TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": TEXT,
}
"""Arguments of both tools with these commands."""
CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a persistent shell.",
        {
            "type": "object",
            "properties": {
                "command": TEXT,
                "restart": {"type": "boolean", "description": "Restart the shell."},
            },
        },
    ),
    "text_editor_": (
        "View, create and edit text files.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": _COMMANDS},
                **_FILE_CHANGE,
            },
            "required": ["command", "path"],
        },
    ),
    "memory_": (
        "View and edit files of a memory that outlasts the conversation.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": [*_COMMANDS, "delete", "rename"]},
                **_FILE_CHANGE,
                "old_path": TEXT,
                "new_path": TEXT,
            },
            "required": ["command"],
        },
    ),
}
"""Anthropic's client-side tools without a schema, by type prefix."""

_log = logging.getLogger("quintet")


class SentCustom(msgspec.Struct, kw_only=True):
    """Freeform tool, in chat completions format."""

    name: str
    description: str | None = None
    format: RawField = msgspec.UNSET


class SentTool(msgspec.Struct, kw_only=True):
    """A tool in any format: nested in ``function``, flat, or Anthropic's."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: RawField = msgspec.UNSET
    input_schema: RawField = msgspec.UNSET
    strict: bool | None = None
    function: FunctionTool | None = None
    custom: SentCustom | None = None
    format: RawField = msgspec.UNSET
    tools: list[SentTool] | None = None
    """Members of a namespace."""
    defer_loading: bool | None = None
    execution: str | None = None
    """``client`` for a tool search that the client runs."""

    @property
    def own_name(self) -> str | None:
        """Name of the tool; None for some hosted tools."""
        nested = self.function or self.custom
        return self.name if nested is None else nested.name


class OfferedTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    """Name that the model sees."""
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    kind: CallKind = "function"
    own_name: str
    """The client's name."""
    namespace: str | None = None
    is_deferred: bool = False
    """True if the model sees it only after a tool search found it."""

    def nested(self) -> dict[str, Any]:
        """Return the tool in chat completions format."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = NO_ARGUMENTS if self.parameters is None else self.parameters
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}

    def definition(self) -> str:
        """Return the tool as JSON text, for a message after a tool search."""
        return encode_json(self.nested()).decode()


_decoder = msgspec.json.Decoder(list[SentTool])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def sent_tools(raw: RawField, where: str) -> list[SentTool]:
    """Decode a list of tools. Raises `RequestError`."""
    return parse.decode_part(raw, _decoder, where) if parse.json_of(raw) else []


def offered_tools(tools: Sequence[SentTool], where: str = "tools") -> list[OfferedTool]:
    """Return the functions to offer for a request's tools. Raises `RequestError`.

    With a server-side tool search all deferred tools are offered, because this server has no search.
    """
    found = [each for i, tool in enumerate(tools) for each in _offered(tool, f"{where}[{i}]")]
    if any(_is_servers_search(tool) for tool in tools):
        for offered in found:
            offered.is_deferred = False
    return found


def shown_tools(raw: RawField) -> bytes:
    """Return the tools that a template shows, nested in ``function``, as JSON; empty without tools."""
    sent = sent_tools(raw, "tools")
    if all(tool.function is not None and tool.type == "function" for tool in sent):
        return parse.json_of(raw) if sent else b""
    offered = offered_tools(sent)
    return encode_json([tool.nested() for tool in offered]) if offered else b""


def with_deferred(tools: bytes, deferred: Sequence[OfferedTool]) -> bytes:
    """Return JSON tools together with deferred ones."""
    if not deferred:
        return tools
    shown_ones = _list_decoder.decode(tools) if tools else []
    return encode_json([*shown_ones, *(tool.nested() for tool in deferred)])


def _is_servers_search(tool: SentTool) -> bool:
    return (tool.type or "").startswith(SEARCH) and tool.execution != "client"


def _offered(tool: SentTool, where: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    kind = tool.type or "function"
    if tool.function is not None:
        sent = tool.function
        yield _function(tool, sent.name, sent.description, sent.parameters, sent.strict, namespace)
    elif kind == "namespace":
        name = _given(tool.name, f"{where}.name")
        for i, member in enumerate(tool.tools or ()):
            yield from _offered(member, f"{where}.tools[{i}]", name)
    elif kind == "custom" and parse.json_of(tool.input_schema) == b"":
        yield _freeform(tool, where, namespace)
    elif (predefined := next((each for each in PREDEFINED_TOOLS if each == kind), None)) is not None:
        description, parameters = PREDEFINED_TOOLS[predefined]
        yield OfferedTool(
            name=kind, own_name=kind, description=description, parameters=parameters, kind=predefined
        )
    elif kind == SEARCH and tool.execution == "client":
        offered = _function(tool, SEARCH, tool.description, tool.parameters, None, None)
        offered.kind = "tool_search"
        yield offered
    elif kind in ("function", "custom"):
        name = _given(tool.name, f"{where}.name")
        yield _function(tool, name, tool.description, _schema_of(tool), tool.strict, namespace)
    elif (known := next((key for key in CLIENT_TOOLS if kind.startswith(key)), None)) is not None:
        description, parameters = CLIENT_TOOLS[known]
        name = tool.name or known.rstrip("_")
        yield OfferedTool(name=name, own_name=name, description=description, parameters=parameters)
    elif (
        tool.name is not None and _schema_of(tool) is not msgspec.UNSET and not kind.startswith(SERVER_TOOLS)
    ):
        yield _function(tool, tool.name, tool.description, _schema_of(tool), tool.strict, namespace)
    else:
        _log.info("%s, of type %s, was skipped: this server runs no tools", where, shown(kind))


def _schema_of(tool: SentTool) -> RawField:
    """Return the schema of a tool that is not nested in ``function``; absent if null."""
    schema = tool.parameters if parse.json_of(tool.parameters) else tool.input_schema
    return schema if parse.json_of(schema) else msgspec.UNSET


def _function(
    tool: SentTool,
    name: str,
    description: str | None,
    schema: RawField,
    strict: bool | None,
    namespace: str | None,
) -> OfferedTool:
    encoded = parse.json_of(schema)
    return OfferedTool(
        name=joined_name(namespace, name),
        own_name=name,
        description=description,
        parameters=msgspec.Raw(encoded) if encoded else None,
        strict=strict,
        namespace=namespace,
        is_deferred=bool(tool.defer_loading),
    )


def _freeform(tool: SentTool, where: str, namespace: str | None) -> OfferedTool:
    """Return a function with one text parameter, for a freeform tool."""
    sent = tool.custom or SentCustom(
        name=_given(tool.name, f"{where}.name"), description=tool.description, format=tool.format
    )
    about: Any = msgspec.json.decode(parse.json_of(sent.format) or b"{}")
    grammar = about.get("grammar", about) if isinstance(about, dict) else {}
    description = "The whole input of the tool, as text."
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        description += f" It follows this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
    text = {"type": "string", "description": description}
    return OfferedTool(
        name=joined_name(namespace, sent.name),
        own_name=sent.name,
        description=sent.description,
        parameters={"type": "object", "properties": {"input": text}, "required": ["input"]},
        kind="custom",
        namespace=namespace,
        is_deferred=bool(tool.defer_loading),
    )


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees for a tool of a namespace."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith("_") or name.startswith("_") else "__") + name


def _given(name: str | None, field: str) -> str:
    if name is None:
        raise invalid(f"{field} is missing; it is required, here or in function.", "tools")
    return name


@dataclass(frozen=True, slots=True)
class Translation:
    """Information of another API's conversation that a `ChatBody` cannot hold."""

    message_names: Sequence[str] = ()
    """Location of each message in the client's body."""
    deferred: Sequence[OfferedTool] = ()
    """Tools that the model may call but the template does not show: found by a tool search."""


AS_SENT = Translation()
