"""Conversations on their way through FastChat, which knows them only as texts.

FastChat asks a worker for a conversation template, makes one text of all messages with it, and sends that as the prompt. No such
template says what a model's own chat template does. So the one that is told here only marks where messages begin and end: what
comes back is read as messages again, and the server renders them as it does for everybody. A prompt without the marks is a text.

Whoever writes the marks into a message begins another one, as with the words of any template of FastChat's.
"""

from __future__ import annotations

BEGIN, END = "\uf8f0", "\uf8f1"
"""Two characters of Unicode's private use."""
ADD_COLON_TWO = 2
"""FastChat's style that takes messages of parts: ``role: message`` and a separator, ``role:`` for what is to come."""

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
"""What `/worker_get_conv_template` tells."""


def messages_of(prompt: str) -> list[dict[str, str]] | None:
    """Read what FastChat made of a conversation; None for a text that is none."""
    if not prompt.startswith(BEGIN):
        return None
    messages = []
    for said in prompt.split(BEGIN)[1:]:
        role, _, content = said.partition(":")
        messages.append({"role": role, "content": content.removeprefix(" ").removesuffix(END)})
    if messages[-1] == {"role": "assistant", "content": ""}:  # what the model is to say
        messages.pop()
    return [message for message in messages if message["content"] or message["role"] != "system"]
