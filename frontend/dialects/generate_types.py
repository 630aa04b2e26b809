"""The body of a request in token ids, as clients send it."""

from __future__ import annotations

import msgspec

from quintet.frontend.dialects.openai_types import RawField, StreamOptions


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    """The prompt."""
    sampling_params: RawField = msgspec.UNSET
    """An object with the fields of completions that say how to choose the output, and when to end it."""
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
