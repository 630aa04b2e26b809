"""Conversations in FastChat's protocol, which transfers them as text.

FastChat renders messages with the worker's conversation template and sends the text as prompt. Such templates cannot express a
model's chat template. So this template only marks message boundaries; the worker parses the text into messages, and the server
applies the model's chat template. A prompt without marks is plain text.

A message that contains the marks can forge further messages, as with all FastChat templates.
"""

from __future__ import annotations

BEGIN, END = "\uf8f0", "\uf8f1"
"""Two characters of the Unicode private use area."""
ADD_COLON_TWO = 2
"""FastChat separator style: ``role: message`` and a separator; ``role:`` for the generation prompt."""

TEMPLATE: dict[str, object] = {
    "name": "quintet",
    "system_template": BEGIN + "system: {system_message}",
    "system_message": "",
    "roles": [BEGIN + "user", BEGIN + "assistant"],
    "messages": [],
    "offset": 0,
    "sep_style": ADD_COLON_TWO,
    "sep": END,
    "sep2": END,
    "stop_str": None,
    "stop_token_ids": None,
}
"""Response of `/worker_get_conv_template`."""


def messages_of(prompt: str) -> list[dict[str, str]] | None:
    """Parse a rendered conversation into messages; None for plain text."""
    if not prompt.startswith(BEGIN):
        return None
    messages = []
    for part in prompt.split(BEGIN)[1:]:
        role, _, content = part.partition(":")
        messages.append({"role": role, "content": content.removeprefix(" ").removesuffix(END)})
    if messages[-1] == {"role": "assistant", "content": ""}:  # generation prompt
        messages.pop()
    return [message for message in messages if message["content"] or message["role"] != "system"]
