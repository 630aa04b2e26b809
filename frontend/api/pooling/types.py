"""Bodies of the endpoints of embeddings. As in `quintet.frontend.api.openai.types`, an absent field takes the default."""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.frontend.api.openai.types import RawField


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields shared by the endpoints."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    """``right`` (default) or ``left``: side of the text that is dropped."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Deadline in seconds; more than 0."""
    stream: bool | None = None
    """Only false."""
    mm_processor_kwargs: RawField = msgspec.UNSET


class EmbeddingBody(PoolingBody, kw_only=True):
    """POST /v1/embeddings: ``input`` or ``messages``."""

    input: str | list[str | int | list[int]] | None = None
    """Text, token ids, or a list of either: one vector for each."""
    messages: list[Any] | None = None
    """A conversation, rendered by the chat template: one vector."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: RawField = msgspec.UNSET
    tools: RawField = msgspec.UNSET
    encoding_format: str | None = None
    """``float`` (default), or ``base64`` of float32 in little-endian order."""
    dimensions: int | None = None
    """Leading components that are returned, for models trained for it (Matryoshka). Normalized after the cut."""
    use_activation: bool | None = None
    """Normalize vectors; default: as the model's configuration says."""
    normalize: bool | None = None
    """As ``use_activation``, in older versions of vLLM."""
    embed_dtype: str | None = None
    """Only ``float32``."""
    endianness: str | None = None
    """Only ``native`` or ``little``."""


Texts = str | list[str]


class ScoreBody(PoolingBody, kw_only=True):
    """POST /score: pairs of texts; ``queries`` and ``documents`` are other names of the two sides."""

    text_1: Texts | None = None
    """One text, or as many as on the other side."""
    text_2: Texts | None = None
    """Texts that are compared with ``text_1``."""
    queries: Texts | None = None
    """As ``text_1``."""
    documents: Texts | None = None
    """As ``text_2``."""
    items: Texts | None = None
    """As ``text_2``."""
    data_1: Texts | None = None
    """As ``text_1``."""
    data_2: Texts | None = None
    """As ``text_2``."""


class TextDocument(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankBody(PoolingBody, kw_only=True):
    """POST /rerank."""

    query: str
    """The text to which documents are compared."""
    documents: list[str | TextDocument]
    """Texts, or objects with a ``text``."""
    top_n: int | None = None
    """Results that are returned; 0 (default) for all."""
    return_documents: bool | None = None
    """False leaves the texts out of the response."""
