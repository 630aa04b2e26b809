"""Normalization of chat messages: the client's messages with the values that a chat template expects.

Roles, contents and calls are kept as sent, as in transformers and vLLM. See docs/chat-templates.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quintet.tokenizer_proc.call_ids import arrange_calls
from quintet.tokenizer_proc.content_parts import normal_parts
from quintet.tokenizer_proc.template_syntax import ContentFormat, TemplateTraits
from quintet.tokenizer_proc.template_values import (
    ContentParts,
    NoContent,
    Part,
    PartsText,
    arguments_of,
    text_part,
)
from quintet.wire.chat import Message
from quintet.wire.errors import invalid
from quintet.wire.message_text import text_only_result, without_billing_header

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names of a message's reasoning."""
TOOL_ROLES = ("tool", "function")
ROLE_ALIASES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API that few templates support, and their replacement."""


def normal_messages(
    messages: Sequence[Message],
    traits: TemplateTraits,
    content_format: ContentFormat | None = None,
    names: Sequence[str] = (),
) -> list[Message]:
    """Normalize messages for a template with these traits.

    ``content_format`` overrides the traits. ``names`` are the messages' names in the client's request, for errors. Raises
    `RequestError` that names the invalid part.
    """
    if not messages:
        raise invalid("messages is an empty list; send at least one message.", "messages")
    normal, is_beside_result = list[Message](), False
    for i, message in enumerate(messages):
        # Agents send the image that a tool has read in a user's message after the tool's result.
        is_beside_result = message["role"] in TOOL_ROLES or (is_beside_result and message["role"] == "user")
        normal.append(_normal_message(message, name_of(i, names), traits, content_format, is_beside_result))
    if normal[0]["role"] in ("system", "developer"):
        normal[0]["content"] = _without_billing_header(normal[0]["content"])
    if any(message["role"] == "tool" or "tool_calls" in message for message in normal):
        arrange_calls(normal, traits.call_id_form)
    return normal


def name_of(index: int, names: Sequence[str]) -> str:
    """Return a message's name in the client's request."""
    return names[index] if index < len(names) else f"messages[{index}]"


def _normal_message(
    message: Message,
    where: str,
    traits: TemplateTraits,
    content_format: ContentFormat | None,
    is_beside_result: bool,
) -> Message:
    role, at = message["role"], f"{where}.content"
    normal = {name: value for name, value in message.items() if value is not None}
    if role in ROLE_ALIASES and role not in traits.words:
        normal["role"] = ROLE_ALIASES[role]
    form = content_format or traits.content_format
    content = message.get("content")
    if role in TOOL_ROLES:
        content = text_only_result(content, at)
    is_text = content is None or isinstance(content, str)
    parts = None if is_text else normal_parts(message, content, at, is_beside_result=is_beside_result)
    if parts and not (traits.has_thinking_parts and form == "openai"):
        parts = _move_thinking(normal, parts)
    normal["content"] = _content(content, parts, form, is_forced=content_format is not None)
    _copy_reasoning(normal)
    calls = normal.pop("tool_calls", None) or _legacy_calls(normal)
    if calls:
        normal["tool_calls"] = [_normal_call(call) for call in calls]
    return normal


def _move_thinking(message: Message, parts: list[Part]) -> list[Part]:
    """Move thinking parts to the message's reasoning field; return the text parts."""
    thoughts = [part["thinking"] for part in parts if part["type"] == "thinking"]
    if thoughts and not any(message.get(name) for name in REASONING):
        message["reasoning_content"] = "\n".join(thoughts)
    return [part for part in parts if part["type"] != "thinking"]


def _content(sent: Any, parts: list[Part] | None, form: ContentFormat, *, is_forced: bool) -> Any:
    """Convert a content for the template. Text becomes a list only if the operator configured it, not if detected."""
    if sent is None:
        return NoContent()
    if form == "string":
        return sent if parts is None else str(ContentParts(parts))
    if parts is not None:
        return ContentParts(parts)
    return ContentParts([text_part(sent)]) if is_forced else PartsText(sent)


def _copy_reasoning(message: Message) -> None:
    """Copy a message's reasoning to each field name that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if reasoning := reasoning or _text_of_blocks(message):
        message |= {name: reasoning for name in REASONING if not message.get(name)}


def _text_of_blocks(message: Message) -> str:
    """Return the reasoning in LiteLLM's field for Anthropic's blocks, or in OpenRouter's for the pieces of a stream."""
    for field, key, separator in (("thinking_blocks", "thinking", "\n"), ("reasoning_details", "text", "")):
        blocks = message.get(field)
        if isinstance(blocks, list):
            texts = [block.get(key) for block in blocks if isinstance(block, dict)]
            return separator.join(text for text in texts if isinstance(text, str))
    return ""


def _legacy_calls(message: Message) -> list[Message]:
    """Convert the deprecated ``function_call`` field to a list of tool calls."""
    call = message.get("function_call")
    return [{"type": "function", "function": call}] if isinstance(call, dict) else []


def _normal_call(call: Message) -> Message:
    custom = call.get("custom")
    if isinstance(custom, dict) and "function" not in call:
        call = {name: value for name, value in call.items() if name != "custom"}
        arguments = {"input": custom.get("input") or ""}
        call |= {"type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    function = {**function, "arguments": arguments_of(function.get("arguments"))}
    return {**call, "type": call.get("type") or "function", "function": function}


def _without_billing_header(content: Any) -> Any:
    """Remove the billing header from the first system message: it differs per request and defeats prefix caching."""
    if isinstance(content, ContentParts) and content and content[0]["type"] == "text":
        text = without_billing_header(content[0]["text"])
        return ContentParts([text_part(text), *content[1:]] if text else content[1:])
    if isinstance(content, NoContent) or not isinstance(content, str):
        return content
    kept = without_billing_header(str(content))
    return PartsText(kept) if isinstance(content, PartsText) else kept
