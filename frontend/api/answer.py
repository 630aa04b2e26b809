"""Responses from streams of deltas, for every API: waiting, one write per wake-up, and the end.

An API implements an `AnswerWriter`. `quintet.frontend.api.outputs` has unstreamed responses.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.http.stream_timers import KeepAliveTimer
from quintet.frontend.resume.stream_state import Answer, StreamCursor, StreamId, StreamState, resume_token_for
from quintet.frontend.resume.token_relay import enable_relay, resume_state
from quintet.frontend.service import Service
from quintet.frontend.streams import Batch, Mailbox, Received, Stream
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import RequestError
from quintet.wire.messages import Prompt, TokenPrompt
from quintet.wire.request import Echo, RequestSpec, adapter_digest

SESSION_HEADER = "x-session-id"
EXPLAIN_HEADER = "x-quintet-explain"
"""With any value, the response names the chosen engine and the reason."""
ROUTING_HEADER = b"x-quintet-routing"
MAX_SESSION = 256
MAX_EXPLAINED = 16
"""Maximum prompts listed: clients and proxies limit headers to a few KiB."""


class AnswerWriter(Protocol):
    """Writer of one streamed response in an API's event format."""

    state: StreamState

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """Append events for the new output of the prompt at index ``position``. Hot path."""

    def tail(self, streams: Sequence[Stream]) -> bytes:
        """Return the last bytes of the stream."""

    def failed(self, error: RequestError) -> bytes:
        """Return the last bytes after an error in the middle of the stream."""

    def silence(self) -> bytes:
        """Return the keep-alive bytes for an idle stream."""


class Body(Protocol):
    """Fields of every generation request."""

    model: str | None
    stream: bool | None
    priority: int | None
    cache_salt: str | None


BeforeEnd = Callable[[Service, AnswerWriter], Awaitable[None]]
"""Hook that runs before the last write of a response. Must not raise."""


class Submissions:
    """Streams of one HTTP request, one per prompt, and their mailbox.

    As a context manager it cancels the streams if the block raises.
    """

    def __init__(self, streams_per_prompt: int = 1) -> None:
        """``streams_per_prompt``: above one if each choice has its own stream."""
        self.mailbox = Mailbox()
        self.streams: list[Stream] = []
        self.streams_per_prompt = streams_per_prompt
        self.num_unread = 0
        """Streams with an unread end."""
        self.client_gone = False
        self.position: StreamCursor | None = None
        """Cursor of a client that already has a part of the response."""
        self.replayed: list[tuple[int, Sequence[int]]] = []
        """Choices and their token ids before the cursor, which a relay gets again."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    def disconnect(self) -> None:
        self.client_gone = True
        self.mailbox.wake()

    def close(self, *, keep: bool = False) -> None:
        """Cancel running streams and drop their output. ``keep``: the client may resume."""
        for stream in self.streams:
            stream.close(keep=keep)

    def add(self, stream: Stream) -> None:
        """Add the stream of one more prompt; it must use this mailbox."""
        self.streams.append(stream)
        self.num_unread += not stream.ended

    @property
    def stream_id(self) -> StreamId | None:
        """Id for resuming the response; None if it is not resumable."""
        submit = self.streams[0].submit
        resume_token = submit.spec.resume_token
        return None if resume_token is None else StreamId(submit.request_id, resume_token.key)

    def unread_bytes(self) -> int:
        return sum(stream.unread_bytes() for stream in self.streams)

    def take(self, stream: Stream) -> Batch:
        """Return the new output of a stream returned by the mailbox."""
        if stream.ended:
            self.num_unread -= 1
        return stream.take()


def echo_of(prompt: Prompt, is_asked: bool) -> Echo:
    """Return how the prompt is echoed: whole where the client sent all its tokens."""
    if not is_asked:
        return Echo.NONE
    is_client_ids = isinstance(prompt, TokenPrompt | EmbedsPrompt) or not prompt.add_special_tokens
    return Echo.WHOLE if is_client_ids else Echo.PLAIN


def submit_all(
    service: Service,
    http_request: HttpRequest,
    body: Body,
    prompts: Sequence[Prompt],
    spec: RequestSpec,
    *,
    clamp_max_tokens: bool,
    answer: Answer | None = None,
    session: str = "",
) -> Submissions:
    """Pass admission and submit one request per prompt; priority and cache salt are the body's, an echo fits each prompt.

    Raises `RequestError`, and then cancels those already submitted. For the parameters see `LiveRequests.submit`.
    ``answer``: event format of a response that can be resumed. Output that its client has from another server
    (`HttpRequest.partial_response`) is not generated again.
    """
    submissions = Submissions()
    interval: int | None = 1 if body.stream else None
    seeds: Sequence[int] = ()
    received: Sequence[Sequence[Received]] = ()
    if answer is not None:
        interval = answer.interval if body.stream else None
        if body.stream and http_request.reads_event_ids:
            spec.resume_token = resume_token_for(answer, service.config)
        if http_request.partial_response is not None:
            seeds, submissions.position, received = resume_state(
                http_request.partial_response, answer.num_choices, answer.num_prompts
            )
    service.admission.check(prompts, spec.params)
    salt, adapter = body.cache_salt or "", adapter_digest(service.config.model, body.model)
    spec = msgspec.structs.replace(spec, priority=body.priority or 0, cache_salt=salt, adapter=adapter)
    with submissions:
        for index, prompt in enumerate(prompts):
            params = msgspec.structs.replace(spec.params, seed=seeds[index]) if seeds else spec.params
            submissions.add(
                service.requests.submit(
                    prompt,
                    msgspec.structs.replace(spec, params=params, echo=echo_of(prompt, bool(spec.echo))),
                    mailbox=submissions.mailbox,
                    interval=interval,
                    clamp_max_tokens=clamp_max_tokens,
                    session=session,
                    received=received[index] if received else (),
                )
            )
    return submissions


async def stream_answer(
    service: Service,
    http_request: HttpRequest,
    submissions: Submissions,
    writer: AnswerWriter,
    before_end: BeforeEnd | None = None,
) -> None:
    """Write the response as events, one write per wake-up, until all streams ended or the client disconnected.

    The status is sent with the first output, so an error before it has its own. ``before_end`` runs before the last write.
    """
    if http_request.wants_relay:
        enable_relay(http_request.headers_out, writer.state, submissions.streams, submissions.replayed)
    write_seconds, span = service.http.write_seconds, service.span
    positions = {stream.request_id: position for position, stream in enumerate(submissions.streams)}
    watcher = http_request.watch_disconnect(submissions.disconnect)
    keep_alive = KeepAliveTimer(service.config.frontend.keep_alive_s, submissions.mailbox.wake)
    reader = service.write_timeout.watch(http_request.abort, submissions.unread_bytes)
    http_request.register_break_silence(submissions.mailbox.wake)
    if submissions.num_unread == 0:
        submissions.mailbox.wake()  # only the end is left to write
    last = False
    try:
        while not last:
            ready = await submissions.mailbox.wait()
            woken_ns = time.monotonic_ns()
            if submissions.client_gone:
                raise ClientDisconnected
            frames = writer.state.take_comments() if ready else []
            error: RequestError | None = None
            for stream in ready:
                batch = submissions.take(stream)
                writer.write(frames, positions[stream.request_id], stream, batch)
                error = error or batch.error
            if error is not None and not http_request.started and not frames:
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
                if not http_request.started:
                    explain(http_request, submissions.streams)
                    await http_request.start_stream(sse.CONTENT_TYPE, writer.state.headers())
                await http_request.write(b"".join(frames) if len(frames) > 1 else frames[0], last)
                reader.waiting_since_s = None
                write_seconds.observe(time.perf_counter() - began)
                span("events", len(ready), woken_ns)
                keep_alive.wrote()
    finally:
        keep_alive.stop()
        service.write_timeout.forget(reader)
        watcher.cancel()
        submissions.close(keep=http_request.started)


def session_of(http_request: HttpRequest, *names: str | None) -> str:
    """Return the session key: the header, else the first non-empty one of ``names``."""
    for name in (http_request.header(SESSION_HEADER), *names):
        if name:
            return name[:MAX_SESSION]
    return ""


def explain(http_request: HttpRequest, streams: Sequence[Stream]) -> None:
    """On request, add the first engine choice of each prompt to the response headers; for a beam search, of round one."""
    if http_request.header(EXPLAIN_HEADER) is None:
        return
    is_explained = any(name == ROUTING_HEADER for name, _ in http_request.headers_out)
    if not is_explained:
        choices = [stream.choice for stream in streams if stream.choice is not None]
        words = [f"engine {choice.index}: {choice.reason}" for choice in choices[:MAX_EXPLAINED]]
        if len(choices) > MAX_EXPLAINED:
            words.append(f"and {len(choices) - MAX_EXPLAINED} prompts more")
        http_request.headers_out.append((ROUTING_HEADER, "; ".join(words).encode()))
