"""Conversion of FastChat's requests, errors and responses to the server's and back.

Errors have a FastChat error code and a message, with HTTP status 200. Each object of a response repeats all text so far.

FastChat's protocol transfers conversations as text. It renders messages with the worker's conversation template and
sends the text as prompt. Such templates cannot express a model's chat template. So this template only marks message
boundaries; the worker parses the text into messages, and the server applies the model's chat template. A prompt
without marks is plain text.

A message that contains the marks can forge further messages, as with all FastChat templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import TypeVar

import msgspec

from quintet.wire.errors import ErrorCode


class Code(IntEnum):
    """FastChat error codes used by this worker."""

    VALIDATION = 40001
    WRONG_KEY = 40102
    INVALID_MODEL = 40301
    OUT_OF_RANGE = 40302
    CONTEXT_OVERFLOW = 40303
    OVERLOADED = 42903
    INTERNAL = 50001
    WORKER_TIMEOUT = 50006


_OF_CODE = {
    ErrorCode.TOO_LONG.value: Code.CONTEXT_OVERFLOW,
    "400": Code.OUT_OF_RANGE,
    "401": Code.WRONG_KEY,
    "404": Code.INVALID_MODEL,
    "413": Code.VALIDATION,
    "422": Code.OUT_OF_RANGE,
    "429": Code.OVERLOADED,
    "503": Code.WORKER_TIMEOUT,
}


class WorkerError(Exception):
    """A request failure with a FastChat error code."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text

    @property
    def body(self) -> dict[str, object]:
        return {"text": self.text, "error_code": int(self.code)}


class ServerError(msgspec.Struct):
    message: str
    code: int | str = "500"
    param: str | None = None


class _Body(msgspec.Struct):
    error: ServerError


def error_in(body: bytes, status: int) -> ServerError:
    try:
        return msgspec.json.decode(body, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ServerError(f"The server returned status {status}.", status)


def as_worker(error: ServerError) -> WorkerError:
    return WorkerError(_OF_CODE.get(str(error.code), Code.INTERNAL), error.message)


def server_lost(error: object) -> WorkerError:
    """Return the error for a lost connection to the server."""
    return WorkerError(Code.WORKER_TIMEOUT, f"The worker lost its server ({error}); retry the request.")


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


DONE = b"[DONE]"


class FastChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0


class Logprobs(msgspec.Struct):
    """Per token: text, text offset, log-probability, and the most likely tokens."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    def add(self, more: Logprobs) -> None:
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs = [*(self.top_logprobs or []), *(more.top_logprobs or [None] * len(more.tokens))]


class ResponseChoice(msgspec.Struct):
    """Text or text delta of a choice."""

    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """Response or stream event of `/v1/completions`."""

    choices: list[ResponseChoice] = []
    usage: FastChatUsage | None = None
    error: ServerError | None = None


_decode = msgspec.json.Decoder(Completion).decode


class FastChatResponse:
    def __init__(self) -> None:
        self._text = ""
        self._usage = FastChatUsage()
        self._logprobs: Logprobs | None = None

    def take(self, event: bytes) -> Iterator[dict[str, object]]:
        """Parse a response or event; yield FastChat objects. Raises `WorkerError` for an error.

        The finish reason has its own object after the text, as FastChat's clients expect.
        """
        completion = _decode(event)
        if completion.error is not None:
            raise as_worker(completion.error)
        self._usage = completion.usage or self._usage
        for choice in completion.choices:
            self._text += choice.text
            if choice.logprobs is not None:
                if self._logprobs is None:
                    self._logprobs = Logprobs()
                self._logprobs.add(choice.logprobs)
            if choice.text or choice.finish_reason is None:
                yield self._so_far(None)
            if choice.finish_reason is not None:
                yield self._so_far(choice.finish_reason)

    def _so_far(self, finish_reason: str | None) -> dict[str, object]:
        fields = {"text": self._text, "error_code": 0, "usage": self._usage, "finish_reason": finish_reason}
        return fields if self._logprobs is None else {**fields, "logprobs": self._logprobs}


class EventData:
    """Incremental parser of the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each completed event."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(DONE, 6):
                yield line[6:].rstrip(b"\r")
