"""What a server says, as FastChat tells it: again and again all of the text so far."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quintet.deploy.integrations.fastchat.errors import ServerError, as_worker

DONE = b"[DONE]"


class Usage(msgspec.Struct):
    """Tokens."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0


class Logprobs(msgspec.Struct):
    """Of every token: its text and where that begins, its log-probability, and those of the likeliest."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    def add(self, more: Logprobs) -> None:
        """Take those that follow."""
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs = [*(self.top_logprobs or []), *(more.top_logprobs or [None] * len(more.tokens))]


class ResponseChoice(msgspec.Struct):
    """Text, or a piece of it."""

    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """An answer of `/v1/completions`, or an event of one."""

    choices: list[ResponseChoice] = []
    usage: Usage | None = None
    error: ServerError | None = None


_decode = msgspec.json.Decoder(Completion).decode


class FastChatResponse:
    """One answer."""

    def __init__(self) -> None:
        self._text = ""
        self._usage = Usage()
        self._logprobs: Logprobs | None = None

    def take(self, event: bytes) -> Iterator[dict[str, object]]:
        """Read an answer or an event of one; yield what FastChat is told of it. Raises `WorkerError` where it is an error.

        The end is told by itself, behind the text that came with it: so do FastChat's workers, and its clients count on it.
        """
        said = _decode(event)
        if said.error is not None:
            raise as_worker(said.error)
        self._usage = said.usage or self._usage
        for choice in said.choices:
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
        told = {"text": self._text, "error_code": 0, "usage": self._usage, "finish_reason": finish_reason}
        return told if self._logprobs is None else {**told, "logprobs": self._logprobs}


class Data:
    """The data of server-sent events, as the bytes of a stream come."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is whole now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(DONE, 6):
                yield line[6:].rstrip(b"\r")
