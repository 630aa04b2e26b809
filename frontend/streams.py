"""Output streams: received output of one request, and the wait of its reader.

`quintet.frontend.live_requests` adds output to a `Stream` until the reader takes it. A slow reader gets fewer, larger
batches; no queue grows with the number of steps.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof

import msgspec

from quintet.frontend.load_balancing.load_balancer import EngineChoice
from quintet.wire.channels import Channel, TextSpan
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, PositionLogprobs, Started, Submit

ALTERNATIVE_BYTES, POSITION_BYTES = 224, 112
"""Bytes per alternative of a token's log-probabilities, and per position."""

UNPROVEN_TOKENS = 16
"""Tokens that may be in flight when an executor dies. A choice that generates more than these did not cause the crash."""

SPAN_BYTES = 96
"""Bytes per span."""


def text_spans(text: str, spans: Sequence[TextSpan]) -> Iterator[tuple[int, int, str]]:
    """Yield (channel, call number, text) for each span; text without a span is content."""
    at = 0
    for channel, call, num_chars in spans:
        yield channel, call, text[at : at + num_chars]
        at += num_chars
    if at < len(text):
        yield Channel.CONTENT, 0, text[at:]


Received = tuple[Sequence[int] | None, bool]
"""Output of one choice that its client has: token ids (None: not even the start), and whether it has the end."""


@dataclass(slots=True)
class OutputDelta:
    """New output of one choice since the last read."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[PositionLogprobs]
    """One per token if log-probabilities were requested, else empty."""
    finish: Finish | None
    """Set once, on the last delta of the choice."""
    spans: Sequence[TextSpan] = ()
    """Spans of ``text`` from first to last character, if parsers read the output; else empty."""


@dataclass(slots=True)
class Batch:
    """All new output of one request since the last read."""

    started: Started | None
    """Set once, on the first batch after prefill."""
    deltas: list[OutputDelta]
    """At most one per choice, in any order."""
    error: RequestError | None = None
    """The request failed: none of its choices generates more."""


@dataclass(slots=True, eq=False)
class StreamChoice:
    """One of a request's ``n`` outputs: received output and the part not yet read."""

    stream: Stream
    index: int
    request_id: int
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    num_chars: int | None = 0
    """Characters received; None before the first text of a resumed choice."""
    num_taken: int = 0
    texts: list[str] = field(default_factory=list)
    spans: list[TextSpan] = field(default_factory=list)
    """Spans of the unread texts, if parsers read the output."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    last_ns: int = 0
    is_dirty: bool = False
    is_resumed: bool = False
    """True if the choice resumes after output of an earlier connection or another server."""

    def resume(self, received: Received) -> None:
        """Resume after the output that the client has."""
        self.is_resumed = True
        ids, has_ended = received
        self.output_ids = array("i", ids or ())
        self.num_taken = len(self.output_ids)
        self.num_chars = None if self.output_ids else 0
        if has_ended:
            self.finish = Finish(self.request_id, FinishReason.NONE, None, len(self.output_ids))

    def note_spans(self, spans: Sequence[TextSpan], num_seen: int) -> None:
        """Add spans of new text; their first ``num_seen`` characters were received before."""
        held = self.spans
        for channel, call, size in spans:
            num_chars = size - num_seen
            num_seen = max(0, -num_chars)
            if num_chars <= 0:
                continue
            if held and held[-1][:2] == (channel, call) and channel != Channel.NAME:
                held[-1] = (channel, call, held[-1][2] + num_chars)
            else:
                held.append((channel, call, num_chars))

    def unread_bytes(self) -> int:
        """Estimate the memory of unread output, in bytes."""
        num_bytes = sum(map(getsizeof, self.texts)) + 8 * len(self.texts) + SPAN_BYTES * len(self.spans)
        if self.logprobs:
            width = 1 + len(self.logprobs[0].top)
            num_bytes += len(self.logprobs) * (POSITION_BYTES + width * ALTERNATIVE_BYTES)
        return num_bytes + 4 * (len(self.output_ids) - self.num_taken)

    def is_due(self, interval: int) -> bool:
        """True if the reader should wake: first output, end, or ``interval`` unread tokens."""
        return (
            self.num_taken == 0
            or self.finish is not None
            or len(self.output_ids) - self.num_taken >= interval
        )

    def take(self) -> OutputDelta:
        """Return unread output and mark it as read."""
        self.is_dirty = False
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        ids = self.output_ids[self.num_taken :]
        self.num_taken = len(self.output_ids)
        logprobs, self.logprobs = self.logprobs, []
        if not self.spans:
            return OutputDelta(self.index, text, ids, logprobs, self.finish)
        spans, self.spans = self.spans, []
        return OutputDelta(self.index, text, ids, logprobs, self.finish, spans)


class Mailbox:
    """Wakes one reader of one or several streams, once per step."""

    def __init__(self) -> None:
        self._ready: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        """True if the next `wait` returns at once."""

    async def wait(self) -> list[Stream]:
        """Return the streams with new output; empty after a `wake` alone. One reader only."""
        if not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_woken = False
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Wake the reader, even without new output."""
        self._is_woken = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def post(self, stream: Stream) -> None:
        """Mark a stream as having new output and wake the reader. Called by `LiveRequests`."""
        self._ready.append(stream)
        self.wake()


class Stream:
    """One submitted request. Read it with ``async for batch in stream``, which raises `RequestError` if the request failed."""

    def __init__(
        self,
        submit: Submit,
        mailbox: Mailbox,
        on_cancel: Callable[[Stream], None],
        interval: int | None = 1,
    ) -> None:
        """interval: see `LiveRequests.submit`."""
        self._on_cancel = on_cancel
        self.submit = submit
        self.mailbox = mailbox
        self.wakes_on_start = False
        """True if a reader with ``interval`` None is also woken at the start."""
        self._interval = interval
        self.choices = [StreamChoice(self, i, submit.request_id + i) for i in range(submit.spec.params.n)]
        self.num_open = submit.spec.params.n
        self.started: Started | None = None
        self.error: RequestError | None = None
        self.vector = b""
        """Result of a pooling request: float32[width]."""
        self.tokenizer: int | None = None
        """Index of the tokenizer that holds the request; None while parked."""
        self.attempt = 0
        """Attempts before this one: its core or detokenizer was lost, or the engine lost the request."""
        self.num_times_unknown = 0
        """Times resumed because the engine did not know it."""
        self.num_tokenizer_deaths = 0
        """Deaths of tokenizers in a row, each while it encoded the request."""
        self.choice: EngineChoice | None = None
        """Last dispatch decision and its reason."""
        self.pinned_core: int | None = None
        """Core that has, or retains, the request. Later attempts go there while it lives."""
        self.prefix_hashes: list[int] = []
        """Prefix hashes of the prompt, if there are several engines."""
        self._num_unproven: list[int] = []
        """Output lengths up to which a choice may still have caused an executor crash: tokens at its last loss of an executor,
        plus `UNPROVEN_TOKENS`. Empty before such a loss."""
        self.is_cancelled = False
        self.is_retained = False
        """True if the core retains it after cancel, so that the client may resume it."""
        self.is_posted = False
        self.is_closed = False
        self.first_token_ns = 0
        self._dirty: list[StreamChoice] = []
        self._new_start = False
        self._new_error = False

    def is_due(self) -> bool:
        """True if the new output is worth waking the reader."""
        if self.num_open == 0:
            return True
        interval = self._interval
        if interval is None:
            return self.wakes_on_start and self._new_start
        return interval == 1 or any(choice.is_due(interval) for choice in self._dirty)

    @property
    def request_id(self) -> int:
        """The id of the first choice."""
        return self.submit.request_id

    @property
    def is_resumed(self) -> bool:
        """True if some output was received before the last dispatch: it is then sent one message per choice."""
        return self.started is not None or any(c.output_ids or c.is_resumed for c in self.choices)

    def resume(self, received: Sequence[Received]) -> None:
        """Advance a stream that has not been sent to its client's cursor."""
        for choice, each in zip(self.choices, received, strict=True):
            choice.resume(each)
        self.num_open = sum(choice.finish is None for choice in self.choices)

    def messages(self) -> list[Submit]:
        """Return the `Submit` messages for running choices: one, or one per choice after output was received."""
        submit = self.submit
        if not self.is_resumed:
            spec = submit.spec
            if spec.attempt == self.attempt:
                return [submit]
            return [msgspec.structs.replace(submit, spec=msgspec.structs.replace(spec, attempt=self.attempt))]
        changes: dict[str, object] = {"n": 1}
        if self.started is not None:
            changes["prompt_logprobs"] = None  # received with the start
        params = msgspec.structs.replace(submit.spec.params, **changes)
        return [
            msgspec.structs.replace(
                submit,
                request_id=choice.request_id,
                spec=msgspec.structs.replace(
                    submit.spec,
                    params=params,
                    choice=choice.index,
                    output_ids=choice.output_ids.tobytes(),
                    replays=False,
                    attempt=self.attempt,
                    resumes=choice.is_resumed,
                ),
            )
            for choice in self.choices
            if choice.finish is None
        ]

    @property
    def ended(self) -> bool:
        """True if every choice has ended. The reader may still have a batch to take."""
        return self.num_open == 0

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)

    async def next_batch(self) -> Batch | None:
        """Wait for new output; None after the last batch. Raises `RequestError` if the request failed.

        Only for a stream with a mailbox of its own.
        """
        while not self.is_posted:
            if self.ended:
                return None
            await self.mailbox.wait()
        batch = self.take()
        if batch.error is not None and batch.started is None and not batch.deltas:
            raise batch.error
        if batch.error is not None:
            self._new_error = True
            self.is_posted = True
            batch.error = None
        return batch

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while (batch := await self.next_batch()) is not None:
            yield batch

    def take(self) -> Batch:
        """Return all unread output without waiting."""
        self.is_posted = False
        started = self.started if self._new_start else None
        error = self.error if self._new_error else None
        self._new_start = self._new_error = False
        dirty, self._dirty = self._dirty, []
        return Batch(started, [choice.take() for choice in dirty], error)

    @property
    def num_open_tokens(self) -> int:
        """Output tokens of running choices."""
        return sum(len(choice.output_ids) for choice in self.choices if choice.finish is None)

    def mark_suspect(self) -> None:
        """Note that its executor died: the request is suspected until a choice generates more."""
        self._num_unproven = [len(choice.output_ids) + UNPROVEN_TOKENS for choice in self.choices]

    @property
    def is_suspect(self) -> bool:
        """True if its executor died and no choice has generated more than the suspected tokens since."""
        return bool(self._num_unproven) and not any(
            len(choice.output_ids) > unproven
            for choice, unproven in zip(self.choices, self._num_unproven, strict=True)
        )

    def unread_bytes(self) -> int:
        """Estimate the bytes held for the reader: text, tokens and log-probabilities."""
        return sum(choice.unread_bytes() for choice in self._dirty)

    def cancel(self) -> None:
        """Ask the engine to stop. Running choices end with `FinishReason.ABORT`, delivered as usual."""
        self._on_cancel(self)

    def close(self, *, keep: bool = False) -> None:
        """Stop reading: cancel the request if it runs, and drop unread output.

        ``keep``: the client may resume it later, at this or another frontend.
        """
        self.is_closed = True
        self.is_retained = keep and self.submit.spec.resume_token is not None
        self._dirty = []
        if not self.ended:
            self.cancel()

    def touch(self, choice: StreamChoice) -> None:
        """Note that a choice has new output. Called by `LiveRequests`."""
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)

    def note_start(self, started: Started) -> None:
        """Note the end of prefill. Called by `LiveRequests`."""
        self.started = started
        self._new_start = True

    def note_error(self, error: RequestError) -> None:
        """Note that the request failed. Called by `LiveRequests`."""
        self.error = error
        self._new_error = True
