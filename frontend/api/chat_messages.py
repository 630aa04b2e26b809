"""Chat messages translated from other APIs: results, calls, and merging of adjacent messages of one role."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quintet.wire.errors import invalid

MERGED_ROLES = ("user", "assistant")
"""Roles with merged messages. Templates treat the others differently."""
TEXTS = ("content", "reasoning_content")

Message = dict[str, Any]
FieldT = TypeVar("FieldT")


def given(value: FieldT | None, name: str) -> FieldT:
    """Return a required field's value. Raises `RequestError` if it is missing."""
    if value is None:
        raise invalid(f"{name} is missing; it is required.", re.split(r"[.\[]", name)[0])
    return value


def call_of(call_id: str, name: str, arguments: object) -> Message:
    """Return a function call of an assistant's message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_message(call_id: str, content: object, names: Mapping[str, str]) -> Message:
    """Return the message with the result of a call. ``names``: called functions, by call id."""
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message | ({"name": names[call_id]} if call_id in names else {})


def merge_messages(found: Sequence[tuple[Message, str]]) -> tuple[list[Message], list[str]]:
    """Merge adjacent messages of one role, in linear time; return them, and the location of the first of each group.

    ``found``: messages and their locations in the body. Texts are joined by line breaks; the text of calls alone is null.
    """
    groups: list[list[Message]] = []
    places: list[str] = []
    for message, place in found:
        role = message["role"]
        if groups and role in MERGED_ROLES and groups[-1][0]["role"] == role:
            groups[-1].append(message)
        else:
            groups.append([message])
            places.append(place)
    return [_merged(group) for group in groups], places


def _merged(group: Sequence[Message]) -> Message:
    first, *others = group
    merged = dict(first)
    for key in TEXTS:
        if any(key in message for message in others):
            merged[key] = "\n".join(filter(None, (message.get(key) for message in group)))
    if any("tool_calls" in message for message in others):
        merged["tool_calls"] = [call for message in group for call in message.get("tool_calls", ())]
    if "tool_calls" in merged:  # templates of DeepSeek show the calls only beside null
        merged["content"] = merged["content"] or None
    return merged
