"""Request and response bodies of the token-in, token-out API."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.openai.types import RawField, StreamOptions


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    """Prompt."""
    sampling_params: RawField = msgspec.UNSET
    """Object with the sampling and stop fields of completions."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    kv_transfer_params: RawField = msgspec.UNSET
    ec_transfer_params: RawField = msgspec.UNSET
    features: RawField = msgspec.UNSET
    content_parts: RawField = msgspec.UNSET


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """One choice of a response in token ids."""

    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: RawField = msgspec.UNSET


class GeneratedUsage(msgspec.Struct):
    """Usage that cannot be counted from the output."""

    prompt_tokens: int = 0


class Generated(msgspec.Struct, kw_only=True):
    """Unstreamed response of `/inference/v1/generate`."""

    choices: list[GeneratedChoice]
    request_id: str | None = None
    prompt_logprobs: RawField = msgspec.UNSET
    usage: GeneratedUsage | None = None


class DerenderChatBody(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions/derender."""

    generate_response: Generated
    chat_request: RawField = msgspec.UNSET
    """The rendered chat request. Without it all output is content."""
    prompt_tokens: int | None = None
    model: str | None = None
    stream: bool | None = None


class DerenderCompletionBody(msgspec.Struct, kw_only=True):
    """POST /v1/completions/derender."""

    generate_responses: list[Generated]
    """One per prompt."""
    completion_request: RawField = msgspec.UNSET
    prompt_tokens: list[int] | None = None
    """One per prompt."""
    model: str | None = None
    stream: bool | None = None
