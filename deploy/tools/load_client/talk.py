"""Blocking client for terminal commands."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import uvloop

from quintet.deploy.http_client.connection import BadUrl, Target
from quintet.deploy.http_client.pool import ConnectionPool, Unreachable, json_request
from quintet.deploy.tools.load_client.load import error_message
from quintet.deploy.tools.load_client.tally import Chunk, ChunkChoice


class ServerError(Exception):
    """The server is unreachable or rejected the request; the message is shown to the user."""


class ListedModel(msgspec.Struct):
    """One entry of ``/v1/models``."""

    id: str
    generation_defaults: dict[str, float] | None = None
    """Sampling defaults of the model's generation config; None from other servers."""


class _Models(msgspec.Struct):
    """Response of ``/v1/models``."""

    data: list[ListedModel]


class TextDelta(NamedTuple):
    """A part of a streamed response."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class Speed:
    """Times and token count of one streamed response."""

    sent_s: float = 0.0
    first_s: float | None = None
    """Time of the first text."""
    ended_s: float = 0.0
    num_tokens: int = 0
    """From the server's usage, else events with text."""

    def text(self) -> str:
        """Format as text; empty without a response."""
        if self.first_s is None:
            return ""
        line = f"first token {self.first_s - self.sent_s:.2f} s"
        taken_s = self.ended_s - self.first_s
        if self.num_tokens > 1 and taken_s > 0:
            line += f", {(self.num_tokens - 1) / taken_s:.1f} tokens/s"
        return line


@dataclass(frozen=True, slots=True)
class Client:
    url: str
    target: Target

    @classmethod
    def of(cls, url: str, api_key: str | None) -> Client:
        """Parse the server URL. Raises `ServerError`."""
        try:
            return cls(url, Target.parse(url, api_key))
        except BadUrl as error:
            raise ServerError(str(error)) from None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises `ServerError`."""
        return self.listed_model(None).id

    def listed_model(self, name: str | None) -> ListedModel:
        """Return the server's entry of a model, or the first entry; an unlisted name is kept. Raises `ServerError`."""
        try:
            listed = msgspec.json.decode(b"".join(self._ask("GET", "/v1/models")), type=_Models).data
            return (
                listed[0]
                if name is None
                else next((each for each in listed if each.id == name), ListedModel(name))
            )
        except (msgspec.MsgspecError, IndexError):
            if name is not None:
                return ListedModel(name)
            raise ServerError(f"{self.url} lists no models; set --model.") from None

    def stream(
        self, path: str, body: Mapping[str, object], speed: Speed | None = None
    ) -> Generator[TextDelta, None, None]:
        """Post a streaming request and yield its deltas; closing the generator aborts the request.

        Fills in ``speed`` if given. Raises `ServerError`.
        """
        speed = Speed() if speed is None else speed
        speed.sent_s = speed.ended_s = time.perf_counter()
        rest = b""
        with contextlib.closing(self._ask("POST", path, {**body, "stream": True})) as chunks:
            for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    content = line[5:].strip() if line.startswith(b"data:") else b""
                    if content == b"[DONE]":
                        return
                    if content:
                        yield from _deltas(content, speed)
        raise ServerError(f"{self.url} closed the stream before its end.")

    def _ask(self, method: str, path: str, body: object = None) -> Generator[bytes, None, None]:
        """Send a request and yield the body of the answer as it arrives. Raises `ServerError`."""
        pool = ConnectionPool(self.target)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.ExitStack() as opened:
            opened.callback(lambda: runner.run(pool.close()))
            try:
                flow = runner.run(pool.open(json_request(self.target, method, path, body)))
                opened.callback(pool.give_back, flow)
                if flow.is_stream:
                    while chunk := runner.run(flow.take()):
                        yield chunk
                    return
                answer = flow.whole.result()
                if answer.status != 200:
                    hint = " Set --api-key." if answer.status == 401 else ""
                    raise ServerError(f"{error_message(answer.body)} (HTTP {answer.status}){hint}")
                yield answer.body
            except Unreachable as error:
                if isinstance(cause := error.__cause__, ssl.SSLCertVerificationError):
                    raise ServerError(
                        f"The TLS certificate of {self.url} was not accepted: {cause.verify_message}.\n"
                        "Use the host name of the certificate, or set SSL_CERT_FILE to the certificate of its issuer."
                    ) from None
                raise ServerError(
                    f"No server responds at {self.url} ({error}).\nStart one with `quintet serve`, or set --url."
                ) from None
            except ConnectionError as error:
                raise ServerError(f"The connection to {self.url} broke: {error}") from None


def _deltas(content: bytes, speed: Speed) -> Generator[TextDelta, None, None]:
    chunk = msgspec.json.decode(content, type=Chunk)
    if chunk.usage is not None:
        speed.num_tokens = chunk.usage.completion_tokens
    if chunk.error is not None:
        raise ServerError(chunk.error if isinstance(chunk.error, str) else chunk.error.message)
    for choice in chunk.choices:
        deltas = _deltas_of(choice)
        if deltas:
            speed.ended_s = time.perf_counter()
            if speed.first_s is None:
                speed.first_s = speed.ended_s
            speed.num_tokens += chunk.usage is None
            yield from deltas


def _deltas_of(choice: ChunkChoice) -> list[TextDelta]:
    """Return the texts of a choice. The delta that ends the reasoning may contain both kinds."""
    delta = choice.delta
    if delta is None:
        return [TextDelta(choice.text)] if choice.text else []
    reasoning = delta.reasoning or delta.reasoning_content  # some servers send both names
    deltas = [TextDelta(reasoning, is_reasoning=True)] if reasoning else []
    return [*deltas, TextDelta(delta.content)] if delta.content else deltas
