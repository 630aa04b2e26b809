"""What comes back for one request, and how its reader waits for it.

A `Stream` gathers what `quintet.frontend.sessions` applies to it until its reader takes it: a slow reader gets fewer,
larger batches, never a queue that grows by the step.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof

import msgspec

from quintet.frontend.load_balancing.load_balancer import EngineChoice
from quintet.frontend.prompt_size import num_prompt_tokens
from quintet.wire.channels import Channel, Span
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, PositionLogprobs, Started, Submit

ALTERNATIVE_BYTES, POSITION_BYTES = 224, 112
"""Memory of one token of log-probabilities, and of the position it is one of."""

UNPROVEN_TOKENS = 16
"""So many more outputs of a choice may have been on their way when an executor died. Who gets further is not what it died of."""

SPAN_BYTES = 96
"""Memory of one span."""


def pieces(text: str, spans: Sequence[Span]) -> Iterator[tuple[int, int, str]]:
    """Yield channel, number of the call and text of each span; text that has none is content."""
    at = 0
    for channel, call, num_chars in spans:
        yield channel, call, text[at : at + num_chars]
        at += num_chars
    if at < len(text):
        yield Channel.CONTENT, 0, text[at:]


@dataclass(slots=True)
class Delta:
    """What was new of one choice since the reader last looked."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[PositionLogprobs]
    """One per token when log-probabilities were asked for, else empty."""
    finish: Finish | None
    """Set once, on the last delta of the choice."""
    spans: Sequence[Span] = ()
    """What ``text`` is made of, from its first character to its last, where the request's output is read by parsers."""


@dataclass(slots=True)
class Batch:
    """Everything that happened to one request since the reader last looked."""

    started: Started | None
    """Set once, on the first batch after the prompt was computed."""
    deltas: list[Delta]
    """At most one per choice, in no particular order of choices."""
    error: RequestError | None = None
    """The request ended with an error: no choice of it produces anything more."""


@dataclass(slots=True, eq=False)
class StreamChoice:
    """One of a request's ``n`` outputs: what was received, and what of it the reader has not taken yet."""

    stream: Stream
    index: int
    request_id: int
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    num_chars: int | None = 0
    """Characters received; None before the first text of a choice that goes on where its client left off."""
    num_taken: int = 0
    texts: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """What the texts are made of, if the output is read by parsers."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    last_ns: int = 0
    is_dirty: bool = False
    adopts: bool = False
    """Whether it goes on for a client who came back, with what the core has kept."""

    def go_on(self, outputs: Sequence[int], num_seen: int | None, has_ended: bool) -> None:
        """Begin where a client left off, which has ``num_seen`` of these outputs (None: not even the beginning)."""
        self.adopts = True
        self.output_ids = array("i", outputs[: num_seen or 0])
        self.num_taken = len(self.output_ids)
        self.num_chars = None if self.output_ids else 0
        if has_ended:
            self.finish = Finish(self.request_id, FinishReason.NONE, None, len(self.output_ids))

    def note_spans(self, spans: Sequence[Span], num_seen: int) -> None:
        """Add what new text is made of; ``num_seen`` characters of these spans were received before."""
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
        """Estimate the memory that is held for the reader."""
        num_bytes = sum(map(getsizeof, self.texts)) + 8 * len(self.texts) + SPAN_BYTES * len(self.spans)
        if self.logprobs:
            width = 1 + len(self.logprobs[0].top)
            num_bytes += len(self.logprobs) * (POSITION_BYTES + width * ALTERNATIVE_BYTES)
        return num_bytes + 4 * (len(self.output_ids) - self.num_taken)

    def is_due(self, interval: int) -> bool:
        """Whether this is its first news, its end, or ``interval`` tokens since the reader last looked."""
        return (
            self.num_taken == 0
            or self.finish is not None
            or len(self.output_ids) - self.num_taken >= interval
        )

    def take(self) -> Delta:
        """Return what is new and forget that it was."""
        self.is_dirty = False
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        ids = self.output_ids[self.num_taken :]
        self.num_taken = len(self.output_ids)
        logprobs, self.logprobs = self.logprobs, []
        if not self.spans:
            return Delta(self.index, text, ids, logprobs, self.finish)
        spans, self.spans = self.spans, []
        return Delta(self.index, text, ids, logprobs, self.finish, spans)


class Mailbox:
    """Where one reader waits for one stream or several: it wakes once for everything that a step brought."""

    def __init__(self) -> None:
        self._ready: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False

    async def wait(self) -> list[Stream]:
        """Return the streams with something to `Stream.take`; empty after a `nudge` alone. One reader only."""
        if not self._ready and not self._nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        ready, self._ready = self._ready, []
        return ready

    def nudge(self) -> None:
        """Wake the reader although nothing arrived."""
        self._nudged = True
        self._wake()

    def post(self, stream: Stream) -> None:
        """Mark a stream as having something new and wake the reader. Called by `Sessions`."""
        self._ready.append(stream)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Stream:
    """One submitted request. Read it with ``async for batch in stream`` (raises `RequestError` if it failed)."""

    def __init__(
        self,
        submit: Submit,
        mailbox: Mailbox,
        on_cancel: Callable[[Stream], None],
        *,
        final_only: bool = False,
        interval: int = 1,
    ) -> None:
        self._on_cancel = on_cancel
        self.submit = submit
        self.mailbox = mailbox
        self._final_only = final_only
        self.tells_start = False
        """Whether a reader of its end alone is woken for its beginning as well."""
        self._interval = interval
        self.choices = [StreamChoice(self, i, submit.request_id + i) for i in range(submit.spec.params.n)]
        self.num_open = submit.spec.params.n
        self.started: Started | None = None
        self.error: RequestError | None = None
        self.tokenizer: int | None = None
        """Index of the tokenizer that holds the request; None while parked."""
        self.attempt = 0
        """How often its core or detokenizer was lost, or it was itself."""
        self.num_lost = 0
        """How often nobody in the engine knew it."""
        self.num_placed = 0
        """Choices that count as work of its core and detokenizer."""
        self.choice: EngineChoice | None = None
        """Where it was sent last, and why there."""
        self.bound_to: int | None = None
        """The engine that has it, or keeps it: where it goes on as long as that lives."""
        self.beginnings: list[int] = []
        """Names of its prompt's beginnings, where there was a choice of engines."""
        self.num_prompt = num_prompt_tokens(submit.prompt)
        """Tokens of its prompt, estimated where it is text."""
        self.num_queued = 0
        """Tokens of its prompt that count as queued at its engine."""
        self.num_before = 0
        """Tokens that its engine had to compute when it was sent there."""
        self.num_kept = 0
        """Tokens of its engine's KV memory that it takes, or will."""
        self.begun_attempt: int | None = None
        """The newest attempt of which the engine said that the prompt was computed."""
        self._num_unproven: list[int] = []
        """How many outputs of each choice prove nothing: those it had when it last left an engine whose executor had died, and
        what may have been on its way; empty before that."""
        self.is_encoding = False
        """Whether it counts as work of its tokenizer."""
        self.is_cancelled = False
        self.is_kept = False
        """Whether its client may come back for it after it was cancelled."""
        self.is_posted = False
        self.is_closed = False
        self.first_token_ns = 0
        self._dirty: list[StreamChoice] = []
        self._untold_start = False
        self._untold_error = False

    def is_due(self) -> bool:
        """Whether what is new is worth waking the reader for."""
        if self.num_open == 0:
            return True
        if self._final_only:
            return self.tells_start and self._untold_start
        return self._interval == 1 or any(choice.is_due(self._interval) for choice in self._dirty)

    @property
    def request_id(self) -> int:
        """The id of the first choice."""
        return self.submit.request_id

    @property
    def is_resumed(self) -> bool:
        """Whether part of it was received before it was sent: it is sent again choice by choice."""
        return self.started is not None or any(c.output_ids or c.adopts for c in self.choices)

    def messages(self) -> list[Submit]:
        """Return what has to be sent for the choices that have not ended: one message, or one each."""
        submit = self.submit
        if not self.is_resumed:
            spec = submit.spec
            if spec.attempt == self.attempt:
                return [submit]
            return [msgspec.structs.replace(submit, spec=msgspec.structs.replace(spec, attempt=self.attempt))]
        changes: dict[str, object] = {"n": 1}
        if self.started is not None:
            changes["prompt_logprobs"] = None  # were received with it
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
                    tells=False,
                    attempt=self.attempt,
                    adopts=choice.adopts,
                ),
            )
            for choice in self.choices
            if choice.finish is None
        ]

    @property
    def ended(self) -> bool:
        """Whether every choice has ended (the reader may still have a batch to take)."""
        return self.num_open == 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.output_ids) for choice in self.choices)

    async def next_batch(self) -> Batch | None:
        """Wait for news; None when everything was told. Raises `RequestError` when the request failed.

        Only for a stream that has its mailbox to itself.
        """
        while not self.is_posted:
            if self.ended:
                return None
            await self.mailbox.wait()
        batch = self.take()
        if batch.error is not None and batch.started is None and not batch.deltas:
            raise batch.error
        if batch.error is not None:
            self._untold_error = True
            self.is_posted = True
            batch.error = None
        return batch

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while (batch := await self.next_batch()) is not None:
            yield batch

    def take(self) -> Batch:
        """Return everything that is new, without waiting."""
        self.is_posted = False
        started = self.started if self._untold_start else None
        error = self.error if self._untold_error else None
        self._untold_start = self._untold_error = False
        dirty, self._dirty = self._dirty, []
        return Batch(started, [choice.take() for choice in dirty], error)

    @property
    def num_open_tokens(self) -> int:
        """Outputs of the choices that have not ended."""
        return sum(len(choice.output_ids) for choice in self.choices if choice.finish is None)

    def suspect(self) -> None:
        """Note that its executor died: until a choice has come further, that may be its doing."""
        self._num_unproven = [len(choice.output_ids) + UNPROVEN_TOKENS for choice in self.choices]

    @property
    def is_suspect(self) -> bool:
        """Whether it was with an executor that died, and no choice has come further since."""
        return bool(self._num_unproven) and not any(
            len(choice.output_ids) > unproven
            for choice, unproven in zip(self.choices, self._num_unproven, strict=True)
        )

    def unread_bytes(self) -> int:
        """Estimate what is held for the reader: text, tokens and log-probabilities."""
        return sum(choice.unread_bytes() for choice in self._dirty)

    def cancel(self) -> None:
        """Ask the engine to stop. The choices that are still open end with `FinishReason.ABORT`, delivered as usual."""
        self._on_cancel(self)

    def close(self, *, keep: bool = False) -> None:
        """Cancel if it still runs, and let go of it: nobody reads this stream any more.

        ``keep``: its client may come back and go on reading elsewhere.
        """
        self.is_closed = True
        self.is_kept = keep and self.submit.spec.claim is not None
        self._dirty = []
        if not self.ended:
            self.cancel()

    def touch(self, choice: StreamChoice) -> None:
        """Note that a choice has news. Called by `Sessions`."""
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)

    def note_start(self, started: Started) -> None:
        """Note that the prompt was computed. Called by `Sessions`."""
        self.started = started
        self._untold_start = True

    def note_error(self, error: RequestError) -> None:
        """Note that the request failed. Called by `Sessions`."""
        self.error = error
        self._untold_error = True
