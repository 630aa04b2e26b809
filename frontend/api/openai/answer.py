"""Response parts shared by completions and chat of the OpenAI API.

`ChunkWriter.write` is the hot path: an event is a prefix made once per choice, the text as JSON, and a suffix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.api.answer import Submissions
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.errors import error_body
from quintet.frontend.api.openai.types import CompletionBody, GenerationBody
from quintet.frontend.api.outputs import Output
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.stream_state import Answer, StreamCursor, StreamId, StreamState
from quintet.frontend.resume.token_relay import ids_comment
from quintet.frontend.streams import Batch, OutputDelta, Stream
from quintet.wire.config import EngineConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, PositionLogprobs, Started
from quintet.wire.params import SamplingParams
from quintet.wire.request import name_in_responses

USAGE_SENT = "u"
"""`StreamCursor.note` after the usage event."""

encode_json = msgspec.json.Encoder().encode

_FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.REPETITION: "repetition",
}


def reason_named(name: str | None) -> FinishReason | None:
    """Return the finish reason of this name, or None."""
    if name == "tool_calls":
        return FinishReason.STOP
    return next((reason for reason, known in _FINISH_NAMES.items() if known == name), None)


def finish_name(finish: Finish) -> str:
    """Return the finish reason's name in the OpenAI API."""
    has_called = finish.num_calls > 0 and finish.reason is FinishReason.STOP
    return "tool_calls" if has_called else _FINISH_NAMES[finish.reason]


class AnswerOptions(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a response in addition to text."""

    response_id: str
    created: int
    model: str
    num_choices: int
    """``n``: choices per prompt."""
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    max_alternatives: int = 0
    """Alternatives per position, without the chosen token."""
    tokens_as_ids: bool = False
    """Format tokens in log-probabilities as ``token_id:7``."""
    return_token_ids: bool = False
    echo: bool = False
    echo_only: bool = False
    """Only the prompt is returned (``max_tokens: 0``); generated tokens are dropped."""
    num_spec_tokens: int | None = None
    """Maximum draft tokens of a step, if the response reports drafts."""

    def head(self, object_name: str) -> dict[str, object]:
        """Return the first fields of a response or event."""
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


def options_of(
    id_prefix: str,
    body: GenerationBody,
    params: SamplingParams,
    http_request: HttpRequest,
    config: EngineConfig,
) -> AnswerOptions:
    """Return the response options of a request; the response id starts with ``id_prefix``."""
    wanted, as_ids = body.stream_options, body.return_tokens_as_token_ids
    include_usage = config.frontend.force_include_usage or (wanted is not None and bool(wanted.include_usage))
    return AnswerOptions(
        response_id=f"{id_prefix}-{parse.request_id(body, http_request)}",
        created=int(time.time())
        if http_request.partial_response is None
        else http_request.partial_response.created,
        model=name_in_responses(config.model, body.model),
        num_choices=params.n,
        include_usage=include_usage,
        continuous_usage=include_usage and wanted is not None and bool(wanted.continuous_usage_stats),
        logprobs=params.logprobs,
        max_alternatives=parse.max_alternatives(params),
        tokens_as_ids=config.frontend.tokens_as_ids if as_ids is None else as_ids,
        return_token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        echo_only=isinstance(body, CompletionBody) and bool(body.echo) and body.max_tokens == 0,
        num_spec_tokens=_reported_drafts(config),
    )


def _reported_drafts(config: EngineConfig) -> int | None:
    speculative = config.scheduler.speculative
    if not config.frontend.reports_drafts:
        return None
    return 0 if speculative is None else speculative.num_speculative_tokens


def running_usage(started: Started, num_outputs: int) -> dict[str, object]:
    """Return the ``usage`` object of an event within a stream."""
    prompt = started.num_prompt_tokens
    return {"prompt_tokens": prompt, "total_tokens": prompt + num_outputs, "completion_tokens": num_outputs}


def usage_of(
    streams: Sequence[Stream], echo_only: bool = False, streams_per_prompt: int = 1
) -> dict[str, object]:
    """Return the ``usage`` object. ``streams_per_prompt``: see `quintet.frontend.api.answer.Submissions`."""
    prompt = completion = cached = 0
    is_read = False
    for number, stream in enumerate(streams):
        if not number % streams_per_prompt and stream.started is not None:
            prompt += stream.started.num_prompt_tokens
            cached += stream.started.num_cached_tokens
        completion += 0 if echo_only else stream.num_output_tokens
        is_read |= stream.submit.spec.parsing is not None
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if is_read:
        finishes = [choice.finish for stream in streams for choice in stream.choices if choice.finish]
        num_reasoning = sum(finish.num_reasoning_tokens for finish in finishes)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def metrics_of(streams: Sequence[Stream], num_spec_tokens: int) -> dict[str, object]:
    """Return the ``metrics`` object with the drafts of a response with one choice, in vLLM's format."""
    choices = [choice for stream in streams for choice in stream.choices]
    finish = choices[0].finish if len(choices) == 1 else None
    if finish is None or finish.drafts is None:
        return {"speculative_decoding": None}
    histogram, num_draft_tokens = finish.drafts.num_steps, finish.drafts.num_draft_tokens
    num_steps = sum(histogram)
    num_accepted = sum(count * number for count, number in enumerate(histogram))
    metrics = {
        "mean_acceptance_length": 1 + num_accepted / num_steps,
        "draft_acceptance_rate": num_accepted / num_draft_tokens,
        "acceptance_histogram": histogram + [0] * (num_spec_tokens + 1 - len(histogram)),
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_draft_tokens,
        "num_spec_tokens": num_spec_tokens,
    }
    return {"speculative_decoding": metrics}


def token_ids_json(token_ids: Sequence[int] | None) -> bytes:
    """Return the JSON field ``token_ids`` of a choice, with a leading comma."""
    return b',"token_ids":' + (b"null" if token_ids is None else encode_json(list(token_ids)))


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """JSON format of one choice of a streamed chunk."""

    head: Callable[[AnswerOptions], dict[str, object]]
    """Head fields of every event, before its choices."""
    open: bytes
    """JSON before the text."""
    close: bytes
    """JSON after the text."""
    plain_end: bytes
    """Rest of a choice without log-probabilities and finish."""
    logprobs: Callable[[Sequence[PositionLogprobs], AnswerOptions], object]
    ids: Callable[[Sequence[int] | None, bytes], bytes]
    """Id fields at the end of a choice, with a leading comma: its tokens (None: not requested), and its prompt's (int32;
    empty: none)."""
    on_start: Callable[[ChunkWriter, int, Started], list[bytes]]
    """Events before the text of a choice, given its index."""
    channels: Callable[[int, OutputDelta], list[bytes]] | None = None
    """Replaces ``open``, text and ``close`` in each event if the text has channels; the last is empty if nothing is to send."""


class ChunkAnswer(Answer):
    """Format of a response with chunks as events."""

    options: AnswerOptions

    def shape(self) -> ChunkFormat:
        """Return the format of its chunks."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output], submissions: Submissions) -> dict[str, object]:
        """Return the unstreamed response."""
        raise NotImplementedError


class ChunkWriter:
    """Writer of the events of one response (an `AnswerWriter`)."""

    def __init__(
        self, answer: ChunkAnswer, stream_id: StreamId | None = None, position: StreamCursor | None = None
    ) -> None:
        """``stream_id``: events have ids and start after ``position`` (default: at the start)."""
        shape, options = answer.shape(), answer.options
        num_choices = answer.num_prompts * options.num_choices
        self._position = position or StreamCursor(num_choices)
        self.state = StreamState(stream_id, self._position, options.created)
        self._event_id = self.state.event_id
        self.streams_per_prompt = 1
        """See `Submissions`."""
        self.shape = shape
        self.options = options
        self._head = b"data: " + encode_json(shape.head(options))[:-1] + b',"choices":['
        self._prefixes = [
            b'%s{"index":%d,%s' % (self._head, index, shape.open) for index in range(num_choices)
        ]
        no_usage = b',"usage":null' if options.include_usage else b""
        self._end = b"]" + no_usage + b"}\n\n"
        self._plain_tail = shape.close + shape.plain_end + b"}" + self._end
        self._has_token_fields = (
            options.logprobs is not None
            or options.return_token_ids
            or options.continuous_usage
            or options.echo_only
        )
        self._is_plain = not self._has_token_fields and shape.channels is None

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        n = self.options.num_choices
        base = position * n
        cursor = self._position
        if batch.started is not None:
            for index in range(base, base + n):
                if cursor.counts[index] is None:
                    frames += self._start(index, batch.started)
        is_plain, prefixes, tail = self._is_plain, self._prefixes, self._plain_tail
        for delta in batch.deltas:
            index = base + delta.choice
            cursor.counts[index] = stream.choices[delta.choice].num_taken
            if self.state.sends_ids and delta.token_ids:
                frames.append(ids_comment(index, delta.token_ids))
            if is_plain and delta.finish is None:
                if delta.text:
                    frame = prefixes[index] + encode_json(delta.text) + tail
                    frames.append(self._identified(frame) if self._event_id else frame)
            else:
                cursor.ended[index] = delta.finish is not None
                frames += self._full(base, stream, delta)

    def _start(self, index: int, started: Started) -> list[bytes]:
        """Return the events before a choice's text; the cursor passes its start with the last of them."""
        *first, last = self.shape.on_start(self, index, started) or [b""]
        frames = [self._identified(frame) for frame in first]
        self._position.counts[index] = 0
        return [*frames, self._identified(last)] if last else frames

    def _identified(self, frame: bytes) -> bytes:
        """Return an event with its cursor as id."""
        if not self._event_id:
            return frame
        cursor = self._position
        if len(cursor.counts) == 1 and not cursor.ended[0] and cursor.counts[0] is not None:
            return b"%b%d\n%b" % (self._event_id, cursor.counts[0], frame)
        return b"%b%b\n%b" % (self._event_id, str(cursor).encode(), frame)

    def _full(self, base: int, stream: Stream, delta: OutputDelta) -> list[bytes]:
        """Return the events of a delta, the last one with every requested field and the cursor."""
        options, index = self.options, base + delta.choice
        text, token_ids, positions = delta.text, delta.token_ids, delta.logprobs
        if options.echo_only:
            text, token_ids, positions = "", (), []
        *earlier, body = [None] if self.shape.channels is None else self.shape.channels(index, delta)
        is_empty = not text if body is None else not body
        if delta.finish is None and is_empty and not (token_ids and self._has_token_fields):
            return []
        usage, started = None, stream.started
        num_taken = stream.choices[delta.choice].num_taken
        if options.continuous_usage and started is not None:
            usage = running_usage(started, 0 if options.echo_only else num_taken)
        is_first = num_taken == len(delta.token_ids) and not options.echo
        last = self.chunk(
            index,
            text,
            logprobs=self.shape.logprobs(positions, options) if positions else None,
            finish=delta.finish,
            token_ids=token_ids if options.return_token_ids else None,
            prompt_ids=started.prompt_ids if is_first and started is not None else b"",
            usage=usage,
            body=None if body is None else body or self.shape.open + b'""' + self.shape.close,
        )
        no_ids = () if options.return_token_ids else None
        parts = [self.chunk(index, "", token_ids=no_ids, usage=usage, body=each) for each in earlier]
        return [*parts, self._identified(last)]

    def usage_at_start(self, started: Started) -> object:
        """Return the usage of events before any text, or None."""
        return running_usage(started, 0) if self.options.continuous_usage else None

    def chunk(
        self,
        index: int,
        text: str,
        logprobs: object = None,
        finish: Finish | None = None,
        token_ids: Sequence[int] | None = None,
        prompt_ids: bytes = b"",
        usage: object = None,
        body: bytes | None = None,
    ) -> bytes:
        """Return one event with any combination of fields. ``prompt_ids`` are int32; ``body`` replaces the text."""
        reason, stop = (None, None) if finish is None else (finish_name(finish), finish.stop_reason)
        return b"".join(
            (
                b'%s{"index":%d,' % (self._head, index),
                self.shape.open + encode_json(text) + self.shape.close if body is None else body,
                b',"logprobs":',
                encode_json(logprobs),
                b',"finish_reason":',
                encode_json(reason),
                b',"stop_reason":',
                encode_json(stop),
                self.shape.ids(token_ids, prompt_ids),
                b"}",
                self._end_with(usage),
            )
        )

    def raw_choice(self, choice: bytes, after: bytes = b"", usage: object = None) -> bytes:
        """Return an event with one choice in API-specific JSON; ``after`` is JSON added to the chunk."""
        return self._head + choice + b"]" + after + self._end_with(usage)[1:]

    def _end_with(self, usage: object) -> bytes:
        return self._end if usage is None else b'],"usage":' + encode_json(usage) + b"}\n\n"

    def failed(self, error: RequestError) -> bytes:
        return sse.frame(error_body(error)) + sse.DONE

    def silence(self) -> bytes:
        return sse.KEEP_ALIVE_WITH_IDS if self._event_id else sse.KEEP_ALIVE

    def tail(self, streams: Sequence[Stream]) -> bytes:
        """Return the end of the stream: usage if requested, and ``[DONE]``."""
        if not self.options.include_usage or self._position.note == USAGE_SENT:
            return sse.DONE
        self._position.note = USAGE_SENT
        usage = encode_json(usage_of(streams, self.options.echo_only, self.streams_per_prompt))
        if self.options.num_spec_tokens is not None:
            usage += b',"metrics":' + encode_json(metrics_of(streams, self.options.num_spec_tokens))
        return self._identified(self._head + b'],"usage":' + usage + b"}\n\n") + sse.DONE
