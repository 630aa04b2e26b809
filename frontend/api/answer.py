"""From streams of deltas to answers, in any dialect: what is waited for, what one write holds, how an answer ends.

A dialect brings an `AnswerWriter` for its streamed answers, and makes a whole one of the `Output`s.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.api.routing import explain
from quintet.frontend.http.http_request import ClientDisconnected, Header, HttpRequest
from quintet.frontend.http.write_timeout import Reader
from quintet.frontend.resume.partial_response import Told
from quintet.frontend.resume.stream_cursor import StreamId
from quintet.frontend.service import Service
from quintet.frontend.streams import Batch, Mailbox, Stream
from quintet.wire.channels import Span
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, PositionLogprobs, Prompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import KvTransfer, OutputParsing, ResumeToken


class AnswerWriter(Protocol):
    """One streamed answer in a dialect: its events, as bytes."""

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """Append the events for what is new of the prompt at ``position``. The hot path."""

    def tail(self, streams: Sequence[Stream]) -> bytes:
        """Return what ends it."""

    def failed(self, error: RequestError) -> bytes:
        """Return what ends it with an error, after its beginning was written."""

    def silence(self) -> bytes:
        """Return what is written when there has been nothing to tell for a while."""

    def headers(self) -> tuple[Header, ...]:
        """Return the headers of the response, besides its content type."""


class Body(Protocol):
    """What every request for an answer may say."""

    stream: bool | None
    priority: int | None
    cache_salt: str | None


BeforeEnd = Callable[[Service, AnswerWriter], Awaitable[None]]
"""What is done with an answer before its end is told. Raises nothing."""


class Submissions:
    """The submissions behind one HTTP request (one per prompt) and the mailbox their news arrive in."""

    def __init__(self, streams_per_prompt: int = 1) -> None:
        """streams_per_prompt: more than one where each choice has a stream of its own."""
        self.mailbox = Mailbox()
        self.streams: list[Stream] = []
        self.streams_per_prompt = streams_per_prompt
        self.num_unread = 0
        """Streams whose end has not been read."""
        self.client_gone = False

    def leave(self) -> None:
        """The client is gone: wake whoever writes for it."""
        self.client_gone = True
        self.mailbox.nudge()

    def close(self, *, keep: bool = False) -> None:
        """Cancel what still runs and let go of everything. ``keep``: the client may come back."""
        for stream in self.streams:
            stream.close(keep=keep)

    def add(self, stream: Stream) -> None:
        """Answer with one more prompt's stream, whose mailbox is this one's."""
        self.streams.append(stream)
        self.num_unread += not stream.ended

    @property
    def stream_id(self) -> StreamId | None:
        """Under which name the client can come back for the answer; None where it cannot."""
        submit = self.streams[0].submit
        claim = submit.spec.claim
        return None if claim is None else StreamId(submit.request_id, claim.key)

    def unread_bytes(self) -> int:
        """Estimate what is held for the client."""
        return sum(stream.unread_bytes() for stream in self.streams)

    def take(self, stream: Stream) -> Batch:
        """Return what is new of a stream that the mailbox named."""
        if stream.ended:
            self.num_unread -= 1
        return stream.take()


def submit_all(
    service: Service,
    body: Body,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    arrival_ns: int,
    deadline_ns: int,
    limit_gives_way: bool,
    claim: ResumeToken | None = None,
    reading: OutputParsing | None = None,
    interval: int = 1,
    echo: bool = False,
    return_prompt_ids: bool = False,
    session: str = "",
    begun: Sequence[Sequence[Told]] = (),
    told: bytes = b"",
    seeds: Sequence[int] = (),
    handover: KvTransfer | None = None,
) -> Submissions:
    """Let a request in and send its prompts on their way, all with these checked parameters.

    Raises `RequestError`, and then none of them is on its way. What the parameters mean: see `Sessions.submit`. ``begun``: of
    every prompt, where other servers told the beginnings of their answers; ``told``: the same (int32) of the only prompt, in a
    dialect whose writers hear all of it once more; ``seeds``: likewise, as they were drawn there.
    """
    service.admission.enter(prompts, params)
    submissions = Submissions()
    try:
        for index, prompt in enumerate(prompts):
            submissions.add(
                service.sessions.submit(
                    prompt,
                    msgspec.structs.replace(params, seed=seeds[index]) if seeds else params,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    echo=echo,
                    return_prompt_ids=return_prompt_ids,
                    arrival_ns=arrival_ns,
                    mailbox=submissions.mailbox,
                    final_only=not body.stream,
                    interval=interval,
                    are_checked=True,
                    claim=claim,
                    deadline_ns=deadline_ns,
                    limit_gives_way=limit_gives_way,
                    reading=reading,
                    session=session,
                    begun=begun[index] if begun else (),
                    told=told,
                    handover=handover,
                )
            )
    except BaseException:
        submissions.close()
        raise
    return submissions


async def stream_answer(
    service: Service,
    exchange: HttpRequest,
    submissions: Submissions,
    writer: AnswerWriter,
    before_end: BeforeEnd | None = None,
) -> None:
    """Write the answer as events, one write per wake-up, until every stream has ended or the client left.

    The status line waits for the first news, so an error before it gets its own. ``before_end`` is awaited before the last write.
    """
    patience, write_seconds, span = service.patience, service.http.write_seconds, service.span
    positions = {stream.request_id: position for position, stream in enumerate(submissions.streams)}
    watcher = exchange.watch_disconnect(submissions.leave)
    pulse = sse.Pulse(service.config.frontend.keep_alive_s, submissions.mailbox.nudge)
    reader = Reader(exchange.abort, submissions.unread_bytes)
    patience.watch(reader)
    exchange.lend_break_silence(submissions.mailbox.nudge)
    if submissions.num_unread == 0:
        submissions.mailbox.nudge()  # nothing is left to tell but the end
    try:
        while True:
            ready = await submissions.mailbox.wait()
            woken_ns = time.monotonic_ns()
            if submissions.client_gone:
                raise ClientDisconnected
            frames: list[bytes] = []
            error: RequestError | None = None
            for stream in ready:
                batch = submissions.take(stream)
                writer.write(frames, positions[stream.request_id], stream, batch)
                error = error or batch.error
            if error is not None and not exchange.started and not frames:
                raise error
            last = error is not None or submissions.num_unread == 0
            if error is not None:
                frames.append(writer.failed(error))
            elif last:
                frames.append(writer.tail(submissions.streams))
            elif not ready:
                frames.append(writer.silence())
            if last and before_end is not None:
                await before_end(service, writer)
            if frames:
                began = reader.waiting_since_s = time.perf_counter()
                if not exchange.started:
                    explain(exchange, submissions.streams)
                    await exchange.start_stream(sse.CONTENT_TYPE, writer.headers())
                await exchange.write(b"".join(frames) if len(frames) > 1 else frames[0], last)
                reader.waiting_since_s = None
                write_seconds.observe(time.perf_counter() - began)
                span("events", len(ready), woken_ns)
                pulse.wrote()
            if last:
                return
    finally:
        pulse.stop()
        patience.forget(reader)
        watcher.cancel()
        submissions.close(keep=exchange.started)


@dataclass(slots=True)
class Output:
    """One choice of a whole answer."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[PositionLogprobs]
    finish: Finish
    stream: Stream
    spans: Sequence[Span]
    """What the text is made of: see `quintet.frontend.streams.pieces`."""


async def whole_answer(exchange: HttpRequest, submissions: Submissions) -> list[Output]:
    """Wait until every stream has ended and return the choices in order, those of the first prompt first.

    Raises the first stream's error, or `ClientDisconnected`; either way what still runs is cancelled.
    """
    bases: dict[int, int] = {}
    num_choices = 0
    for stream in submissions.streams:
        bases[stream.request_id] = num_choices
        num_choices += len(stream.choices)
    outputs: dict[int, Output] = {}
    watcher = exchange.watch_disconnect(submissions.leave)
    try:
        while submissions.num_unread:
            ready = await submissions.mailbox.wait()
            if submissions.client_gone:
                raise ClientDisconnected
            for stream in ready:
                batch = submissions.take(stream)
                if batch.error is not None:
                    raise batch.error
                for delta in batch.deltas:
                    index = bases[stream.request_id] + delta.choice
                    assert delta.finish is not None, f"choice {index} delivered before its end"
                    outputs[index] = Output(
                        index, delta.text, delta.token_ids, delta.logprobs, delta.finish, stream, delta.spans
                    )
    finally:
        watcher.cancel()
        submissions.close()
    explain(exchange, submissions.streams)
    return [outputs[index] for index in sorted(outputs)]
