"""Resume token: secret and response shape, sent with a streamed request so that any frontend can resume it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from quintet.frontend.resume.stream_cursor import MAX_CHOICES
from quintet.wire.config import EngineConfig
from quintet.wire.request import ResumeToken

KEY_BYTES = 16


class Answer(msgspec.Struct, array_like=True):
    """Content of `ResumeToken.answer`: event format of a stream. Each API extends it (`registry.RESUMABLE_APIS`)."""

    num_prompts: int
    """Prompts of the HTTP request. Their ids are consecutive, ``num_choices`` for each."""
    num_choices: int
    """Per prompt."""
    interval: int
    """Tokens per event."""


encode_answer: Callable[[Answer], bytes] = msgspec.msgpack.Encoder().encode


def claim_for(answer: Answer, config: EngineConfig) -> ResumeToken | None:
    """Build the resume token; None if resuming is disabled or there are too many choices."""
    if config.scheduler.resume_grace_s <= 0 or answer.num_prompts * answer.num_choices > MAX_CHOICES:
        return None
    return ResumeToken(secrets.token_bytes(KEY_BYTES), encode_answer(answer))
