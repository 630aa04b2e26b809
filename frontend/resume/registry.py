"""Registry of resumable APIs: answer type in the resume token, and its event writer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quintet.frontend.api.answer import AnswerWriter, BeforeEnd
from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.api.anthropic.events import MessagesAnswer, MessagesWriter
from quintet.frontend.api.inference import generate
from quintet.frontend.api.inference.generate import GenerateAnswer
from quintet.frontend.api.openai import chat as openai_chat
from quintet.frontend.api.openai import completions as openai_completions
from quintet.frontend.api.openai import errors as openai_errors
from quintet.frontend.api.openai.chat import ChatAnswer
from quintet.frontend.api.openai.completions import CompletionAnswer
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.output import ResponsesAnswer
from quintet.frontend.api.responses.response_history import store_end
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.resume.stream_cursor import Answer, StreamCursor, StreamId
from quintet.frontend.resume.token_relay import RelayedWriter
from quintet.wire.request import ResumeToken


class Writer(AnswerWriter, RelayedWriter, Protocol):
    """Writer of the events of a resumable stream."""


@dataclass(frozen=True, slots=True)
class ResumableApi:
    """One API with resumable streams."""

    errors: ErrorShape
    writer: Callable[[Any, StreamId | None, StreamCursor | None], Writer]
    """Makes the writer of a response that has ids (or None), starting after a cursor (None: at the start)."""
    needs_replay: bool = False
    """True if the writer needs the output from its start, wherever the cursor is."""
    before_end: BeforeEnd | None = None


RESUMABLE_APIS: dict[type[Answer], ResumableApi] = {
    CompletionAnswer: ResumableApi(openai_errors.ERRORS, openai_completions.writer),
    ChatAnswer: ResumableApi(openai_errors.ERRORS, openai_chat.writer),
    MessagesAnswer: ResumableApi(anthropic_errors.ERRORS, MessagesWriter),
    GenerateAnswer: ResumableApi(openai_errors.ERRORS, generate.writer),
    ResponsesAnswer: ResumableApi(
        openai_errors.ERRORS, ResponsesWriter, needs_replay=True, before_end=store_end
    ),
}
"""By answer type of the resume token."""

_KINDS: Any = functools.reduce(operator.or_, RESUMABLE_APIS)
_decode: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(_KINDS).decode


def answer_of(resume_token: ResumeToken) -> Answer:
    """Decode the answer given to `resume_token.resume_token_for`."""
    return _decode(resume_token.answer)


def api_of(answer: Answer) -> ResumableApi:
    """Return the API of an answer."""
    return RESUMABLE_APIS[type(answer)]
