"""Translates conversation items of the Responses API to chat messages.

Reasoning, text and calls of one assistant turn are merged into one message; a call's result is a tool message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quintet.frontend.api.chat_messages import Message, call_of, given, merge_messages, result_message
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.offered_tools import (
    SEARCH,
    OfferedTool,
    joined_name,
    offered_tools,
    sent_tools,
)
from quintet.frontend.api.responses.output import CALL_KINDS, text_of_state
from quintet.frontend.api.responses.types import ContentPart, InputItem
from quintet.wire.errors import invalid
from quintet.wire.message_text import omitted_media, text_only_result
from quintet.wire.params import shown

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
UNSUPPORTED_PARTS = {
    "input_image": "image input",
    "input_audio": "audio input",
    "input_file": "file input",
}
ADDED_TOOLS = "additional_tools"

RESULT_FIELDS = ("text", "stdout", "outcome")
"""Fields of `ContentPart`, one of which is in each part of a tool's result."""

EMPTY_REASONING: Message = {"role": "assistant", "content": ""}
"""Message of a reasoning item without text."""

_part_decoder = msgspec.json.Decoder(ContentPart)
_log = logging.getLogger("quintet")


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> tuple[list[Message], list[str]]:
    """Return the chat messages of these items, and each one's location in the body. Raises `RequestError`.

    Item references were resolved before. Adjacent messages of one role are merged, except system messages, which
    templates treat differently.
    """
    found: list[tuple[Message, str]] = []
    if instructions:
        found.append(({"role": "system", "content": instructions}, "instructions"))
    names: dict[str, str] = {}
    is_beside_result = False
    for index in range(_num_leading(items), len(items)):
        item = items[index]
        # Agents send the image that a tool has read in a user's message after the tool's result.
        is_beside_result = _is_result(item) or (is_beside_result and item.role == "user")
        for message in _messages_of(item, f"input[{index}]", names, is_beside_result=is_beside_result):
            if message != EMPTY_REASONING:
                found.append((message, f"input[{index}]"))
    return merge_messages(found)


def leading_tools(items: Sequence[InputItem]) -> list[OfferedTool]:
    """Return the tools of the leading items: the template shows them with the request's own."""
    return _tools_of(items, range(_num_leading(items)))


def found_tools(items: Sequence[InputItem]) -> list[OfferedTool]:
    """Return the tools that later items add or that tool searches found."""
    later = range(_num_leading(items), len(items))
    return _tools_of(items, [i for i in later if items[i].type in ("tool_search_output", ADDED_TOOLS)])


def _num_leading(items: Sequence[InputItem]) -> int:
    return next((i for i, item in enumerate(items) if item.type != ADDED_TOOLS), len(items))


def _tools_of(items: Sequence[InputItem], indices: Iterable[int]) -> list[OfferedTool]:
    return [
        tool
        for index in indices
        for tool in offered_tools(
            sent_tools(items[index].tools, f"input[{index}].tools"), f"input[{index}].tools"
        )
    ]


def _is_result(item: InputItem) -> bool:
    return item.role == "tool" or (item.type or "").endswith("_output")


def _messages_of(
    item: InputItem, where: str, names: dict[str, str], *, is_beside_result: bool
) -> list[Message]:
    """Return the messages of one item. ``names``: called functions, by call id; updated."""
    match item.type:
        case None | "" | "message":  # VS Code sent an empty type
            return [_message(item, where, names, is_beside_result=is_beside_result)]
        case "reasoning":
            thoughts = item.content or text_of_state(item.encrypted_content) or item.summary or ""
            content = _text(thoughts, f"{where}.content")
            return [
                {"role": "assistant", "content": "", **({"reasoning_content": content} if content else {})}
            ]
        case "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call" | "apply_patch_call":
            return [_call(item, where, names)]
        case "function_call_output" if item.call_id is None:  # Codex: text of another task, without a call
            return [{"role": "user", "content": _output(item, where)}]
        case "agent_message":
            return [{"role": "user", "content": _text(item.content or "", f"{where}.content")}]
        case (
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
        ):
            return [_result(item, _output(item, where), where, names)]
        case "apply_patch_call_output":
            text = given(item.status, f"{where}.status") if item.output is None else _output(item, where)
            return [_result(item, text, where, names)]
        case "mcp_call" if item.output is not None:
            return [_call(item, where, names), _result(item, _output(item, where), where, names)]
        case "tool_search_call" if item.call_id is not None:
            return [_call(item, where, names)]
        case "tool_search_output" if item.call_id is not None:
            return [_result(item, _definitions(item, where) or "No tools were found.", where, names)]
        case "configuration_update":
            return []
        case "additional_tools":
            text = _definitions(item, where)
            return [{"role": "system", "content": f"Tools available:\n{text}"}] if text else []
    if item.type in (*TEXT_PARTS, *UNSUPPORTED_PARTS):
        raise invalid(
            f"{where} is a part of type {shown(item.type)}; send it in the content of a message.", "input"
        )
    _log.info("%s, an item of type %s, was skipped: it is of another server's tool", where, shown(item.type))
    return []


def _message(item: InputItem, where: str, names: dict[str, str], *, is_beside_result: bool) -> Message:
    """Return the message of an item, also of one in the format of chat completions.

    ``is_beside_result``: text replaces media.
    """
    role = given(item.role, f"{where}.role")
    if role == "tool":
        text = _text(item.content, f"{where}.content", is_result=True)
        return _result(item, text, where, names)
    if role not in ROLES:
        raise invalid(f"{where}.role is {shown(role)}; it must be one of {', '.join(ROLES)}.", "input")
    is_answer = role == "assistant"
    is_empty = item.content is None and is_answer
    content = "" if is_empty else _text(item.content, f"{where}.content", is_result=is_beside_result)
    message: Message = {"role": role, "content": content}
    if item.tool_calls and is_answer:
        calls = [
            InputItem(call_id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in item.tool_calls
        ]
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]", names)["tool_calls"][0] for i, call in enumerate(calls)
        ]
    return message


def is_reference(item: InputItem) -> bool:
    """True if an item refers to a stored one."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _definitions(item: InputItem, where: str) -> str:
    """Return an item's tools as text."""
    tools = offered_tools(sent_tools(item.tools, f"{where}.tools"), f"{where}.tools")
    return "\n".join(tool.definition() for tool in tools)


def _call(item: InputItem, where: str, names: dict[str, str]) -> Message:
    """Return a message with a function call."""
    call_id = given(item.call_id or item.id, f"{where}.call_id")
    match item.type:
        case "custom_tool_call":
            name = joined_name(item.namespace, given(item.name, f"{where}.name"))
            arguments: Any = encode_json({"input": given(item.input, f"{where}.input")}).decode()
        case "local_shell_call" | "shell_call" | "apply_patch_call":
            name = CALL_KINDS[item.type]
            arguments = _predefined_arguments(item, where)
        case "tool_search_call":
            name = SEARCH
            arguments = item.arguments
        case _:
            name = joined_name(item.namespace, given(item.name, f"{where}.name"))
            arguments = "{}" if item.arguments is None else item.arguments
    names[call_id] = name
    if not isinstance(arguments, str):
        arguments = encode_json(arguments or {}).decode()
    return {"role": "assistant", "content": "", "tool_calls": [call_of(call_id, name, arguments)]}


def _predefined_arguments(item: InputItem, where: str) -> dict[str, Any]:
    """Return the arguments of a shell or apply_patch call."""
    name, field = (
        ("operation", item.operation) if item.type == "apply_patch_call" else ("action", item.action)
    )
    encoded = parse.json_of(field)
    sent: Any = msgspec.json.decode(encoded) if encoded else None
    if not isinstance(sent, dict):
        raise invalid(f"{where}.{name} must be an object.", "input")
    if name == "operation":
        return sent
    action = {name: value for name, value in sent.items() if value not in (None, {}) and name != "type"}
    if "working_directory" in action:
        action["workdir"] = action.pop("working_directory")
    return action


def _result(item: InputItem, text: str, where: str, names: dict[str, str]) -> Message:
    call_id = given(item.call_id or item.tool_call_id or item.id, f"{where}.call_id")
    return result_message(call_id, text, names)


def _output(item: InputItem, where: str) -> str:
    """Return a result as text: empty without one, JSON for data."""
    output = text_only_result("" if item.output is None else item.output, f"{where}.output", RESULT_FIELDS)
    if isinstance(output, str):
        return output
    return "\n".join(
        each
        if isinstance(each, str)
        else _text_of(_part(each, f"{where}.output[{i}]"), f"{where}.output[{i}]")
        for i, each in enumerate(output)
    )


def _part(sent: Any, where: str) -> ContentPart:
    return parse.decode_part(msgspec.Raw(encode_json(sent)), _part_decoder, where)


def _text(content: str | Sequence[ContentPart] | None, where: str, *, is_result: bool = False) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        (omitted_media(part.type, f"{where}[{index}]") if is_result else None)
        or _text_of(part, f"{where}[{index}]")
        for index, part in enumerate(given(content, where))
    )


def _text_of(part: ContentPart, where: str) -> str:
    if part.type in (*TEXT_PARTS, "reasoning_text", "summary_text"):
        return given(part.text, f"{where}.text")
    if part.type == "refusal":
        return given(part.refusal, f"{where}.refusal")
    if part.type == "encrypted_content":
        return given(part.encrypted_content, f"{where}.encrypted_content")
    if part.type == "" and (part.stdout is not None or part.outcome is not None):
        return _command_text(part)
    if part.type == "" and part.text is not None:
        return part.text
    missing = UNSUPPORTED_PARTS.get(part.type, "parts of that type")
    raise parse.not_implemented(f"{where}, of type {shown(part.type)},", missing, "Send text.")


def _command_text(part: ContentPart) -> str:
    """Return a command's stdout, stderr, and how it ended unless it succeeded."""
    lines = [part.stdout, part.stderr]
    if part.outcome is not None and part.outcome.type == "timeout":
        lines.append("[timed out]")
    elif part.outcome is not None and part.outcome.exit_code:
        lines.append(f"[exit code {part.outcome.exit_code}]")
    return "\n".join(line.rstrip("\n") for line in lines if line)
