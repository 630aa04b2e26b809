"""Parts of a message's content in every format that clients send, as text and thinking."""

from __future__ import annotations

from typing import Any

from quintet.tokenizer_proc.template_values import ContentParts, Part, text_part
from quintet.wire.chat import Message
from quintet.wire.errors import invalid
from quintet.wire.message_text import MEDIA_TYPES, TEXT_PARTS, omitted_media
from quintet.wire.params import shown

THINKING_PARTS = ("thinking", "reasoning")
CALL_PARTS = ("tool_use", "tool_call", "tool-call", "function_call")
"""Types of parts that repeat a call of the message's ``tool_calls``."""


def normal_parts(message: Message, content: Any, where: str, *, is_beside_result: bool = False) -> list[Part]:
    """Return a content's parts as text and thinking, without those of an answer that have no text.

    ``is_beside_result``: text replaces media, as in the result of a tool.
    Raises `RequestError` that names the invalid part.
    """
    if isinstance(content, dict):
        raise invalid(f"{where} is an object; it must be a string or a list of parts.", where)
    is_answer = message["role"] == "assistant"
    has_calls = bool(message.get("tool_calls") or message.get("function_call"))
    return [
        _normal_part(part, f"{where}[{i}]", replaces_media=is_beside_result)
        for i, part in enumerate(content)
        if not (is_answer and _has_no_text(part, has_calls=has_calls))
    ]


def _has_no_text(part: Any, *, has_calls: bool) -> bool:
    """Return whether a part is of another type: a call, which is also in ``tool_calls``, or encrypted reasoning."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in MEDIA_TYPES or (kind in CALL_PARTS and not has_calls):
        return False
    has_text = kind not in THINKING_PARTS or isinstance(_text_of(part, kind), str | list)
    return kind not in TEXT_PARTS or not has_text


def _text_of(part: Part, kind: str) -> Any:
    """Return a part's text; LangChain's reasoning has it in a field named as the type."""
    return part.get(TEXT_PARTS[kind], part.get(kind))


def _normal_part(part: Any, where: str, *, is_nested: bool = False, replaces_media: bool = False) -> Part:
    if isinstance(part, str):
        return text_part(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None and isinstance(part, dict) and isinstance(part.get("text"), str):
        kind = "text"
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if replaces_media and isinstance(kind, str) and (omitted := omitted_media(kind, where)):
        return text_part(omitted)
    if kind is None or field is None:
        # Agents that find the words about images remove them and send the conversation again.
        reason = (
            "calls belong in tool_calls"
            if kind in CALL_PARTS
            else "this is not a multimodal model: it does not support image input or other media"
        )
        raise invalid(
            f"{where} has type {shown(kind)}; {reason}. Allowed types: {', '.join(TEXT_PARTS)}.", where
        )
    text = _text_of(part, kind)
    if kind in THINKING_PARTS and isinstance(text, list) and not is_nested:  # Mistral's clients nest parts
        inner = (_normal_part(item, f"{where}.{field}[{i}]", is_nested=True) for i, item in enumerate(text))
        text = str(ContentParts(inner))
    if not isinstance(text, str):
        raise invalid(f"{where}.{field} must be a string.", f"{where}.{field}")
    return {"type": "thinking", "thinking": text} if kind in THINKING_PARTS else text_part(text)
