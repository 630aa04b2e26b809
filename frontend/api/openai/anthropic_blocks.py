"""Blocks of Anthropic's API in messages of chat completions: Cursor sends calls and results in this form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CALL, RESULT = "tool_use", "tool_result"
FIELDS = {CALL: ("id", "name"), RESULT: ("tool_use_id",)}
"""Texts that a block must have."""

Message = dict[str, Any]


def with_plain_calls(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return checked messages with blocks of calls as ``tool_calls`` and those of results as tool messages.

    The second result is each message's place in the body. Calls that are also in ``tool_calls`` are kept.
    """
    names: dict[str, str] = {}
    found: list[Message] = []
    places: list[str] = []
    for index, message in enumerate(messages):
        plain = _plain(message, names)
        found += plain
        places += [f"messages[{index}]"] * len(plain)
    return found, places


def _plain(message: Message, names: dict[str, str]) -> list[Message]:
    """Return the messages of one message. ``names``: called functions, by call id; updated."""
    sent = message.get("content")
    content: list[Any] = sent if isinstance(sent, list) else []
    kind = {"assistant": CALL, "user": RESULT}.get(message["role"])
    blocks = [part for part in content if _is_block(part, kind)]
    if not blocks or message.get("tool_calls"):
        return [message]
    others = [part for part in content if not _is_block(part, kind)]
    if kind == CALL:
        names |= {block["id"]: block["name"] for block in blocks}
        return [{**message, "content": others or None, "tool_calls": [_call(block) for block in blocks]}]
    results = [_result(block, names) for block in blocks]
    return [*results, {**message, "content": others}] if others else results


def _is_block(part: Any, kind: str | None) -> bool:
    if kind is None or not isinstance(part, dict) or part.get("type") != kind:
        return False
    return all(isinstance(part.get(field), str) for field in FIELDS[kind])


def _call(block: Message) -> Message:
    function = {"name": block["name"], "arguments": block.get("input")}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Message, names: dict[str, str]) -> Message:
    call = block["tool_use_id"]
    message = {"role": "tool", "tool_call_id": call, "content": block.get("content")}
    return message | ({"name": names[call]} if call in names else {})
