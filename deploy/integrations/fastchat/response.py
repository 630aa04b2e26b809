"""Conversion of server responses to FastChat's format, which repeats all text so far in each object."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quintet.deploy.integrations.fastchat.errors import ServerError, as_worker

DONE = b"[DONE]"


class FastChatUsage(msgspec.Struct):
    """Token counts."""

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
        """Append log-probabilities."""
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
    """State of one response."""

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
