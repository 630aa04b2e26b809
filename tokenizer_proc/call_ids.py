"""Call ids in the form of the chat template, and results in the order of their calls.

Some templates reject ids of another length. Kimi K2 reads the function from the id, and imitates ids of another form in its next
calls, or ends its turn. Agents send other forms: of another model's calls, or with ``_`` for ``.`` and ``:``.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

from quintet.wire.chat import Message

ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def arrange_calls(messages: list[Message], form: int | Literal["numbered"] | None) -> None:
    """Rewrite the ids of calls and results to the template's form, unless it has none, and order the results."""
    if form is not None:
        _map_call_ids(messages, form)
    for index, message in enumerate(messages):
        if len(message.get("tool_calls", ())) > 1:
            _order_results(messages, index + 1, [call.get("id") for call in message["tool_calls"]])


def _order_results(messages: list[Message], begin: int, call_ids: list[Any]) -> None:
    """Sort the results from ``begin`` by their calls: many templates show no ids, and agents send results as tools end.

    Results keep their order if one has no id, or the id of no call.
    """
    end = begin
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    places = {
        call_id: place for place, call_id in reversed([*enumerate(call_ids)]) if isinstance(call_id, str)
    }
    results = messages[begin:end]
    ids = [result.get("tool_call_id") for result in results]
    if all(isinstance(each, str) and each in places for each in ids):
        messages[begin:end] = sorted(results, key=lambda result: places[result["tool_call_id"]])


def _map_call_ids(messages: list[Message], form: int | Literal["numbered"]) -> None:
    """Rewrite the ids of calls and results. Valid ids are kept."""
    pending: list[str] = []
    known: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            sent = str(call.get("id") or f"call {number}")
            call["id"] = _numbered_id(sent, call, number) if form == "numbered" else _fitting_id(sent, form)
            known[sent] = call["id"]
            pending.append(call["id"])
            number += 1
        if message["role"] == "tool":
            message["tool_call_id"] = _id_of_result(message.get("tool_call_id"), known, pending, form)
            if message["tool_call_id"] in pending:
                pending.remove(message["tool_call_id"])


def _id_of_result(
    sent: Any, known: dict[str, str], pending: list[str], form: int | Literal["numbered"]
) -> str:
    """Return the id of a result: its call's; that of the first call without a result if it has none."""
    if not (isinstance(sent, str) and sent):
        sent = pending[0] if pending else "call"
    return known.get(sent) or (sent if form == "numbered" else _fitting_id(sent, form))


def _numbered_id(sent: str, call: Message, number: int) -> str:
    """Return ``functions.name:number``: the one sent if it names the function, otherwise the call's own."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else ""
    is_valid = re.fullmatch(rf"functions\.{re.escape(str(name))}:[0-9]+", sent) is not None
    return sent if is_valid else f"functions.{name}:{number}"


def _fitting_id(text: str, length: int) -> str:
    """Return an alphanumeric id of ``length``: the one sent if valid, otherwise a hash of it."""
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.blake2b(text.encode()).digest(), "little")
    base = len(ALPHANUMERIC)
    return "".join(ALPHANUMERIC[number // base**place % base] for place in range(length))
