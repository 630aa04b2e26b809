"""Call ids in the format of the chat template: some templates reject ids of another length."""

from __future__ import annotations

import hashlib
from typing import Any

from quintet.wire.chat import Message

ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def map_call_ids(messages: list[Message], length: int) -> None:
    """Rewrite the ids of calls and results to the template's length. Valid ids are kept."""
    pending: list[str] = []
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _fitting_id(call.get("id") or f"call {number}", length)
            pending.append(call["id"])
            number += 1
        if message["role"] == "tool":
            sent = message.get("tool_call_id")
            known = _fitting_id(sent, length) if isinstance(sent, str) and sent else None
            message["tool_call_id"] = known or (pending[0] if pending else _fitting_id("call", length))
            if message["tool_call_id"] in pending:
                pending.remove(message["tool_call_id"])


def _fitting_id(sent: Any, length: int) -> str:
    """Return an alphanumeric id of ``length``: the one sent if valid, otherwise a hash of it."""
    text = str(sent)
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.blake2b(text.encode()).digest(), "little")
    base = len(ALPHANUMERIC)
    return "".join(ALPHANUMERIC[number // base**place % base] for place in range(length))
