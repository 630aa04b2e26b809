"""What FastChat asks of a worker, and what the server is asked for it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from quintet.deploy.integrations.fastchat.conversation import messages_of
from quintet.deploy.integrations.fastchat.errors import Code, WorkerError

Kind = TypeVar("Kind")

LEAST_TOP_P = 1e-6
"""FastChat allows 0, which here is the likeliest token alone as well."""
MAX_NEW_TOKENS = 256
"""Where a client does not say, as FastChat's workers have it."""


class Params(msgspec.Struct, kw_only=True):
    """A prompt and how to go on with it. What is null, or not sent, is as FastChat's workers have it."""

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


class Counted(msgspec.Struct):
    """A prompt whose tokens are to be counted."""

    prompt: str
    model: str | None = None


_AS_THEY_ARE = (
    "model", "temperature", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "logprobs",
    "best_of", "use_beam_search", "seed",
)  # fmt: skip


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Read a request. Raises `WorkerError`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WorkerError(Code.VALIDATION, f"The request cannot be read: {error}") from None


def completion_of(params: Params, prompt: str | list[int], is_streamed: bool) -> dict[str, object]:
    """Return the request for `/v1/completions`; ``prompt``: as text, or its ids. Raises `WorkerError`."""
    if params.images:
        raise WorkerError(
            Code.OUT_OF_RANGE, "The request has images, and this model reads text: send it without."
        )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    body: dict[str, object] = {name: getattr(params, name) for name in _AS_THEY_ARE}
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
    """Return the request for `/tokenize`: of a conversation as the model's chat template renders it, or of a text."""
    messages = messages_of(prompt)
    body: dict[str, object] = {"prompt": prompt} if messages is None else {"messages": messages}
    return body if model is None else {**body, "model": model}
