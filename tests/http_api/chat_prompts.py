"""Prompts that the engine receives for requests of each API with chat messages."""

from __future__ import annotations

from typing import Any

from quintet.wire.chat import Message, decode_messages
from quintet.wire.messages import ChatPrompt, Submit

H, R, M = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LIMITS = {H: "max_tokens", R: "max_output_tokens", M: "max_tokens"}


def prompt_of(server: Any, path: str, body: dict[str, Any]) -> ChatPrompt:
    """Send a request and return the prompt that the engine received."""
    reply = server.ask("POST", path, {"model": "toy", LIMITS[path]: 4, **body})
    assert reply.status == 200, reply.json
    prompt = server.engine.wait_for(Submit)[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages_of(server: Any, path: str, body: dict[str, Any]) -> list[Message]:
    """Send a request and return the chat messages that the engine received."""
    return decode_messages(prompt_of(server, path, body).messages)
