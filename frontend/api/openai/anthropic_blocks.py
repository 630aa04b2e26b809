"""Blocks of Anthropic's API in messages of chat completions: Cursor sends calls and results in this form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quintet.frontend.api.chat_messages import Message, call_of, result_message
from quintet.wire.errors import invalid
from quintet.wire.params import shown

CALL, RESULT = "tool_use", "tool_result"
FIELDS = {CALL: ("id", "name"), RESULT: ("tool_use_id",)}
"""Texts that a block must have."""


def with_plain_calls(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return checked messages with blocks of calls as ``tool_calls`` and those of results as tool messages.

    The second result is each message's place in the body. Blocks beside ``tool_calls`` are kept. Raises `RequestError`.
    """
    names: dict[str, str] = {}
    found: list[Message] = []
    places: list[str] = []
    for index, message in enumerate(messages):
        plain = _plain(message, names, f"messages[{index}].content")
        found += plain
        places += [f"messages[{index}]"] * len(plain)
    return found, places


def _plain(message: Message, names: dict[str, str], place: str) -> list[Message]:
    """Return the messages of one message. ``names``: called functions, by call id; updated."""
    sent = message.get("content")
    content: list[Any] = sent if isinstance(sent, list) else []
    kind = {"assistant": CALL, "user": RESULT}.get(message["role"])
    if message.get("tool_calls"):
        return [message]
    blocks = [part for index, part in enumerate(content) if _is_block(part, kind, f"{place}[{index}]")]
    if not blocks:
        return [message]
    others = [part for part in content if part not in blocks]
    if kind == CALL:
        names |= {block["id"]: block["name"] for block in blocks}
        calls = [call_of(block["id"], block["name"], block.get("input")) for block in blocks]
        return [{**message, "content": others or None, "tool_calls": calls}]
    results = [result_message(block["tool_use_id"], block.get("content"), names) for block in blocks]
    return [*results, {**message, "content": others}] if others else results


def _is_block(part: Any, kind: str | None, place: str) -> bool:
    """Return whether a part is a block of this kind. Raises `RequestError` if it lacks a field."""
    if kind is None or not isinstance(part, dict) or part.get("type") != kind:
        return False
    for field in FIELDS[kind]:
        if not isinstance(part.get(field), str):
            raise invalid(
                f"{place} has type '{kind}' and {field} {shown(part.get(field))}; {field} must be a string.",
                place,
            )
    return True
