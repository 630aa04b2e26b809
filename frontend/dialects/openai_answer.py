"""From streams of deltas to the answers of the OpenAI dialect: the part completions and chat have in common.

The hot path is `ChunkWriter.write`: an event is a prefix made once per choice, the text as JSON, and a suffix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quintet.frontend.dialects import errors, sse
from quintet.frontend.dialects import openai_parse as parse
from quintet.frontend.dialects.openai_types import CompletionBody, GenerationBody
from quintet.frontend.dialects.position import Position, StreamId
from quintet.frontend.exchange import ClientGone, Exchange, Header
from quintet.frontend.patience import Reader
from quintet.frontend.service import Service
from quintet.frontend.streams import Batch, Delta, Mailbox, Stream
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, PositionLogprobs, Started
from quintet.wire.params import SamplingParams

encode_json = msgspec.json.Encoder().encode

FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer carries besides text."""

    response_id: str
    created: int
    model: str
    num_choices: int
    """``n``: choices per prompt."""
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    max_alternatives: int = 0
    """Tokens shown at each position besides the chosen one."""
    tokens_as_ids: bool = False
    """Spell tokens as ``token_id:7`` in log-probabilities."""
    return_token_ids: bool = False
    echo: bool = False
    echo_only: bool = False
    """The prompt was asked for and nothing else (``max_tokens: 0``): what was generated is not shown."""


def options_of(
    id_prefix: str, body: GenerationBody, params: SamplingParams, exchange: Exchange, model: ModelConfig
) -> AnswerOptions:
    """Return what the client asked for besides text; its id begins with ``id_prefix``."""
    wanted = body.stream_options
    include_usage = wanted is not None and bool(wanted.include_usage)
    return AnswerOptions(
        response_id=f"{id_prefix}-{parse.request_id(body, exchange)}",
        created=int(time.time()),
        model=model.served_names[0],
        num_choices=params.n,
        include_usage=include_usage,
        continuous_usage=include_usage and wanted is not None and bool(wanted.continuous_usage_stats),
        logprobs=params.logprobs,
        max_alternatives=parse.max_alternatives(params),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        echo_only=isinstance(body, CompletionBody) and bool(body.echo) and body.max_tokens == 0,
    )


class Submissions:
    """The submissions behind one HTTP request (one per prompt) and the mailbox their news arrive in."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.streams: list[Stream] = []
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

    def unread_bytes(self) -> int:
        """Estimate what is held for the client."""
        return sum(stream.unread_bytes() for stream in self.streams)

    def take(self, stream: Stream) -> Batch:
        """Return what is new of a stream that the mailbox named."""
        if stream.ended:
            self.num_unread -= 1
        return stream.take()


def usage_of(streams: Sequence[Stream], echo_only: bool = False) -> dict[str, object]:
    """Return the ``usage`` object of an answer."""
    starts = [stream.started for stream in streams if stream.started is not None]
    prompt = sum(started.num_prompt_tokens for started in starts)
    completion = 0 if echo_only else sum(stream.num_output_tokens for stream in streams)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(started.num_cached_tokens for started in starts)},
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How a dialect spells one choice of a streamed chunk."""

    object_name: str
    open: bytes
    """Before the text."""
    close: bytes
    """After the text."""
    plain_end: bytes
    """The rest of a choice that has neither log-probabilities nor a finish."""
    logprobs: Callable[[Sequence[PositionLogprobs], AnswerOptions], object]
    on_start: Callable[[ChunkWriter, int, Started], list[bytes]]
    """The events that come before the text of a choice, given its index."""


class ChunkWriter:
    """Writes the events of one streamed answer."""

    def __init__(
        self,
        shape: Shape,
        options: AnswerOptions,
        num_prompts: int,
        stream_id: StreamId | None = None,
        position: Position | None = None,
    ) -> None:
        """``stream_id``: events carry ids and go on after ``position`` (default: from the beginning)."""
        self.stream_id = stream_id
        self._position = position or Position(num_prompts * options.num_choices)
        self._event_id = b"" if stream_id is None else b"id: " + str(stream_id).encode() + b":"
        self.shape = shape
        self.options = options
        head = encode_json(
            {
                "id": options.response_id,
                "object": shape.object_name,
                "created": options.created,
                "model": options.model,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._prefixes = [
            b'%s{"index":%d,%s' % (self._head, index, shape.open)
            for index in range(num_prompts * options.num_choices)
        ]
        no_usage = b',"usage":null' if options.include_usage else b""
        self._end = b"]" + no_usage + b"}\n\n"
        self._plain_tail = shape.close + shape.plain_end + b"}" + self._end
        self._is_plain = not (
            options.logprobs is not None
            or options.return_token_ids
            or options.continuous_usage
            or options.echo_only
        )

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """Append the events for what is new of the prompt at ``position``."""
        n = self.options.num_choices
        base = position * n
        told = self._position
        if batch.started is not None:
            for index in range(base, base + n):
                if told.counts[index] < 0:
                    frames += self._start(index, batch.started)
        is_plain, prefixes, tail = self._is_plain, self._prefixes, self._plain_tail
        for delta in batch.deltas:
            index = base + delta.choice
            told.counts[index] = stream.choices[delta.choice].num_taken
            if is_plain and delta.finish is None:
                if delta.text:
                    frame = prefixes[index] + encode_json(delta.text) + tail
                    frames.append(self._identified(frame) if self._event_id else frame)
            else:
                told.ended[index] = delta.finish is not None
                full = self._full(base, stream, delta)
                if full is not None:
                    frames.append(self._identified(full))

    def _start(self, index: int, started: Started) -> list[bytes]:
        """Return the events that come before the text of a choice; its beginning is told with the last of them."""
        *first, last = self.shape.on_start(self, index, started) or [b""]
        frames = [self._identified(frame) for frame in first]
        self._position.counts[index] = 0
        return [*frames, self._identified(last)] if last else frames

    def _identified(self, frame: bytes) -> bytes:
        """Return an event with the id of where its reader is after it."""
        if not self._event_id:
            return frame
        told = self._position
        if len(told.counts) == 1 and not told.ended[0] and told.counts[0] >= 0:
            return b"%b%d\n%b" % (self._event_id, told.counts[0], frame)
        return b"%b%b\n%b" % (self._event_id, str(told).encode(), frame)

    def _full(self, base: int, stream: Stream, delta: Delta) -> bytes | None:
        """Return an event with everything the client asked for, or None when there is nothing to tell."""
        options = self.options
        text, token_ids, positions = delta.text, delta.token_ids, delta.logprobs
        if options.echo_only:
            text, token_ids, positions = "", (), []
        if delta.finish is None and not text and not (token_ids and not self._is_plain):
            return None
        extra = b""
        if options.return_token_ids:
            extra = b',"token_ids":' + encode_json(list(token_ids))
        usage = None
        if options.continuous_usage and stream.started is not None:
            usage = self._running_usage(stream, delta)
        return self.chunk(
            base + delta.choice,
            text,
            logprobs=self.shape.logprobs(positions, options) if positions else None,
            finish=delta.finish,
            extra=extra,
            usage=usage,
        )

    def _running_usage(self, stream: Stream, delta: Delta) -> dict[str, object]:
        prompt = stream.started.num_prompt_tokens if stream.started is not None else 0
        completion = 0 if self.options.echo_only else stream.choices[delta.choice].num_taken
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def chunk(
        self,
        index: int,
        text: str,
        logprobs: object = None,
        finish: Finish | None = None,
        extra: bytes = b"",
        usage: object = None,
    ) -> bytes:
        """Return one event with any combination of fields. ``extra`` is JSON added to the choice."""
        end = self._end if usage is None else b'],"usage":' + encode_json(usage) + b"}\n\n"
        reason, stop = (None, None) if finish is None else (FINISH_NAMES[finish.reason], finish.stop_reason)
        return b"".join(
            (
                self._prefixes[index],
                encode_json(text),
                self.shape.close,
                b',"logprobs":',
                encode_json(logprobs),
                b',"finish_reason":',
                encode_json(reason),
                b',"stop_reason":',
                encode_json(stop),
                extra,
                b"}",
                end,
            )
        )

    def raw_choice(self, choice: bytes, after: bytes = b"") -> bytes:
        """Return an event with one choice spelled by the dialect; ``after`` is JSON added to the chunk."""
        return self._head + choice + b"]" + after + self._end[1:]

    def headers(self) -> tuple[Header, ...]:
        """Return the headers of the response."""
        if self.stream_id is None:
            return sse.HEADERS
        return (*sse.HEADERS, (b"x-stream-id", str(self.stream_id).encode()))

    def tail(self, streams: Sequence[Stream]) -> bytes:
        """Return what ends the stream: usage when asked for, and ``[DONE]``."""
        if not self.options.include_usage or self._position.usage_told:
            return sse.DONE
        self._position.usage_told = True
        usage = encode_json(usage_of(streams, self.options.echo_only))
        return self._identified(self._head + b'],"usage":' + usage + b"}\n\n") + sse.DONE


async def stream_answer(
    service: Service, exchange: Exchange, submissions: Submissions, writer: ChunkWriter
) -> None:
    """Write the answer as events, one write per wake-up, until every stream has ended or the client left.

    The status line waits for the first news, so that an error found before any output still gets its own status. A client
    that leaves after it may come back for the rest.
    """
    patience, write_seconds, span = service.patience, service.http.write_seconds, service.span
    positions = {stream.request_id: position for position, stream in enumerate(submissions.streams)}
    watcher = exchange.watch_disconnect(submissions.leave)
    pulse = sse.Pulse(service.config.frontend.keep_alive_s, submissions.mailbox.nudge)
    reader = Reader(exchange.abort, submissions.unread_bytes)
    patience.watch(reader)
    if submissions.num_unread == 0:
        submissions.mailbox.nudge()  # nothing is left to tell but the end
    try:
        while True:
            ready = await submissions.mailbox.wait()
            woken_ns = time.monotonic_ns()
            if submissions.client_gone:
                raise ClientGone
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
                frames.append(sse.frame(errors.body_of(error)))
                frames.append(sse.DONE)
            elif last:
                frames.append(writer.tail(submissions.streams))
            elif not ready:
                frames.append(sse.KEEP_ALIVE)
            if frames:
                began = reader.waiting_since_s = time.perf_counter()
                if not exchange.started:
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


async def whole_answer(exchange: Exchange, submissions: Submissions, options: AnswerOptions) -> list[Output]:
    """Wait until every stream has ended and return the choices in order.

    Raises the first stream's error, or `ClientGone`; either way what still runs is cancelled.
    """
    positions = {stream.request_id: position for position, stream in enumerate(submissions.streams)}
    outputs: dict[int, Output] = {}
    watcher = exchange.watch_disconnect(submissions.leave)
    try:
        while submissions.num_unread:
            ready = await submissions.mailbox.wait()
            if submissions.client_gone:
                raise ClientGone
            for stream in ready:
                batch = submissions.take(stream)
                if batch.error is not None:
                    raise batch.error
                for delta in batch.deltas:
                    index = positions[stream.request_id] * options.num_choices + delta.choice
                    assert delta.finish is not None, f"choice {index} delivered before its end"
                    outputs[index] = Output(
                        index, delta.text, delta.token_ids, delta.logprobs, delta.finish, stream
                    )
    finally:
        watcher.cancel()
        submissions.close()
    if options.echo_only:
        for output in outputs.values():
            output.text, output.token_ids, output.logprobs = "", (), []
    return [outputs[index] for index in sorted(outputs)]
