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


class MergedMessages:
    """Chat messages and their locations in the body. Merges in linear time."""

    def __init__(self) -> None:
        self.places: list[str] = []
        """Location of the first message of each group."""
        self._groups: list[list[Message]] = []

    def add(self, message: Message, place: str) -> None:
        """Add a message; it belongs to the group before it if both have the same role."""
        role = message["role"]
        if self._groups and role in MERGED_ROLES and self._groups[-1][0]["role"] == role:
            self._groups[-1].append(message)
        else:
            self._groups.append([message])
            self.places.append(place)

    def merged(self) -> list[Message]:
        """Return one message per group, with texts joined by line breaks, and null for the text of calls alone."""
        return [_merged(group) for group in self._groups]


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
