"""What a streamed request brings along so that any frontend can go on with its answer: a secret, and the answer's shape."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from quintet.frontend.resume.stream_cursor import MAX_CHOICES
from quintet.wire.config import EngineConfig
from quintet.wire.request import ResumeToken

KEY_BYTES = 16


class Answer(msgspec.Struct, array_like=True):
    """Inside `ResumeToken.answer`: how the events of a stream are written. Each dialect has its own (`registry.DIALECTS`)."""

    num_prompts: int
    """Prompts of the HTTP request. Their ids follow each other, each ``num_choices`` after the one before."""
    num_choices: int
    """Per prompt."""
    interval: int
    """Tokens between events."""


encode_answer: Callable[[Answer], bytes] = msgspec.msgpack.Encoder().encode


def claim_for(answer: Answer, config: EngineConfig) -> ResumeToken | None:
    """Return what makes a streamed request resumable; None where that is switched off, or there are too many choices."""
    if config.scheduler.resume_grace_s <= 0 or answer.num_prompts * answer.num_choices > MAX_CHOICES:
        return None
    return ResumeToken(secrets.token_bytes(KEY_BYTES), encode_answer(answer))
