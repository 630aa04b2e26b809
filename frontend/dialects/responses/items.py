"""Items of a conversation in the Responses dialect, as the messages that chat templates are written for.

What one turn of the assistant thought, said and called is one message; a result of a call is a message of the tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quintet.frontend.dialects.openai import parse
from quintet.frontend.dialects.responses.types import ContentPart, InputItem
from quintet.wire.params import shown

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Of messages, by those of templates."""
TEXT_PARTS = ("input_text", "output_text", "text")
UNSEEN_PARTS = {
    "input_image": "models that see",
    "input_audio": "models that hear",
    "input_file": "a reader of files",
}
TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")

Message = dict[str, Any]
NO_THOUGHT: Message = {"role": "assistant", "content": ""}
"""What an item of reasoning is whose text nobody told."""


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Return the messages that these items are; references were resolved. Raises `RequestError`."""
    found: list[Message] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        message = _message_of(item, f"input[{index}]", names)
        if message == NO_THOUGHT:
            continue
        if found and found[-1]["role"] == message["role"] != "tool":
            _join(found[-1], message)
        else:
            found.append(message)
    return found


def _message_of(item: InputItem, where: str, names: dict[str, str]) -> Message:
    """Return one item as a message. ``names``: of the functions that were called, by the id of the call; grows."""
    match item.type:
        case None | "message":
            role = _given(item.role, f"{where}.role")
            if role not in ROLES:
                raise parse.invalid(
                    f"{where}.role is {shown(role)}; it must be one of {', '.join(ROLES)}.", "input"
                )
            content = _text(item.content, f"{where}.content")
            return {"role": ROLES[role], "content": content}
        case "function_call":
            call_id = _given(item.call_id, f"{where}.call_id")
            names[call_id] = _given(item.name, f"{where}.name")
            function = {"name": names[call_id], "arguments": _given(item.arguments, f"{where}.arguments")}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            call_id = _given(item.call_id, f"{where}.call_id")
            output = _text(item.output, f"{where}.output")
            message = {"role": "tool", "tool_call_id": call_id, "content": output}
            return message | ({"name": names[call_id]} if call_id in names else {})
        case "reasoning":
            thoughts = item.content or item.summary or ""
            content = _text(thoughts, f"{where}.content")
            return {"role": "assistant", "content": "", **({"reasoning_content": content} if content else {})}
    raise parse.not_implemented(
        f"{where}, an item of type {shown(item.type)},",
        "items of that type",
        f"It takes {', '.join(TYPES)}.",
    )


def _join(message: Message, more: Message) -> None:
    """Append a message of the same role."""
    message["content"] = "\n".join(filter(None, (message["content"], more["content"])))
    if "reasoning_content" in more:
        before = message.get("reasoning_content")
        message["reasoning_content"] = "\n".join(filter(None, (before, more["reasoning_content"])))
    if "tool_calls" in more:
        message["tool_calls"] = message.get("tool_calls", []) + more["tool_calls"]


def _text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    if content is None:
        raise parse.invalid(f"{where} is missing; it is required.", "input")
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_of(part: ContentPart, where: str) -> str:
    if part.type in (*TEXT_PARTS, "reasoning_text", "summary_text"):
        return _given(part.text, f"{where}.text")
    if part.type == "refusal":
        return _given(part.refusal, f"{where}.refusal")
    missing = UNSEEN_PARTS.get(part.type, "parts of that type")
    raise parse.not_implemented(f"{where}, of type {shown(part.type)},", missing, "Send text.")


def _given(value: parse.PartT | None, name: str) -> parse.PartT:
    if value is None:
        raise parse.invalid(f"{name} is missing; it is required.", "input")
    return value
