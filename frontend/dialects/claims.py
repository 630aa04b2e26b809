"""What a streamed request brings along so that any frontend can go on with its answer: a secret, and the answer's shape."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from quintet.frontend.dialects.openai_answer import AnswerOptions
from quintet.frontend.dialects.position import MAX_CHOICES
from quintet.wire.config import EngineConfig
from quintet.wire.messages import Claim

KEY_BYTES = 16


class Answer(msgspec.Struct, array_like=True):
    """Inside `Claim.answer`: how the events of a stream are written."""

    kind: Literal["completion", "chat"]
    options: AnswerOptions
    num_prompts: int
    """Prompts of the HTTP request. Their ids follow each other, each ``n`` after the one before."""
    interval: int
    role: str = ""
    """Of a chat: who speaks."""
    prefix: str = ""
    """Of a chat: what is echoed before the answer."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


def claim_for(answer: Answer, config: EngineConfig) -> Claim | None:
    """Return what makes a streamed request resumable; None where that is switched off, or there are too many choices."""
    num_choices = answer.num_prompts * answer.options.num_choices
    if config.scheduler.resume_grace_s <= 0 or num_choices > MAX_CHOICES:
        return None
    return Claim(secrets.token_bytes(KEY_BYTES), _encode(answer))


def answer_of(claim: Claim) -> Answer:
    """Return what `claim_for` was given."""
    return _decode(claim.answer)
