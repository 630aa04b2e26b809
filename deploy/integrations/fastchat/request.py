"""Conversion of FastChat requests to server requests.

FastChat's protocol transfers conversations as text. It renders messages with the worker's conversation template and
sends the text as prompt. Such templates cannot express a model's chat template. So this template only marks message
boundaries; the worker parses the text into messages, and the server applies the model's chat template. A prompt
without marks is plain text.

A message that contains the marks can forge further messages, as with all FastChat templates.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from quintet.deploy.integrations.fastchat.errors import Code, WorkerError

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


Kind = TypeVar("Kind")

LEAST_TOP_P = 1e-6
"""Replaces FastChat's 0, which means greedy sampling."""
MAX_NEW_TOKENS = 256
"""Default of FastChat's workers."""


class Params(msgspec.Struct, kw_only=True):
    """Prompt and sampling parameters; missing ones have the defaults of FastChat's workers."""

    prompt: str
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    seed: int | None = None
    images: list[object] | None = None


class TokenCountRequest(msgspec.Struct):
    """A request to count the tokens of a prompt."""

    prompt: str
    model: str | None = None


_UNCHANGED = (
    "model", "temperature", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "logprobs",
    "best_of", "use_beam_search", "seed",
)  # fmt: skip


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Parse a request. Raises `WorkerError`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WorkerError(Code.VALIDATION, f"Invalid request: {error}") from None


def completion_of(params: Params, prompt: str | list[int], is_streamed: bool) -> dict[str, object]:
    """Return the `/v1/completions` request; ``prompt`` is text or token ids. Raises `WorkerError`."""
    if params.images:
        raise WorkerError(
            Code.OUT_OF_RANGE, "The request contains images, but this model supports text only; remove them."
        )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    body: dict[str, object] = {name: getattr(params, name) for name in _UNCHANGED}
    body |= {
        "prompt": prompt,
        "max_tokens": MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens,
        "top_p": None if params.top_p is None else max(params.top_p, LEAST_TOP_P),
        "stop": [stop for stop in stops if stop],
        "echo": params.echo is not False,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return {name: value for name, value in body.items() if value is not None}


def tokenization_of(prompt: str, model: str | None) -> dict[str, object]:
    """Return the `/tokenize` request for a conversation or a text."""
    messages = messages_of(prompt)
    body: dict[str, object] = {"prompt": prompt} if messages is None else {"messages": messages}
    return body if model is None else {**body, "model": model}
