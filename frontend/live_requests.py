"""Live requests of one frontend: ids, dispatch, received output, and exactly one end for each.

Pure asyncio over messages without HTTP, so that the Python API uses it too. Not thread-safe: call it from one
event loop.

    submit ──▶ dispatched (`quintet.frontend.load_balancing.dispatcher`) ──▶ started ──▶ ended
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import msgspec

from quintet.frontend.deadlines import DeadlineTimer, expired, is_expired_by_core
from quintet.frontend.load_balancing.dispatcher import UNENCODABLE, Dispatcher, Send, not_encodable
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.load_balancing.loss_recovery import LossRecovery
from quintet.frontend.load_balancing.workers import Workers
from quintet.frontend.reconcile import (
    MAX_TIMES_UNKNOWN,
    Report,
    missing_output_error,
    poison_error,
    reports_of,
    unknown_request_error,
)
from quintet.frontend.request_metrics import RequestMetrics
from quintet.frontend.streams import Mailbox, Received, Stream, StreamChoice
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.codec import unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.errors import RequestError, invalid
from quintet.wire.ids import RequestIds, Role, WorkerId
from quintet.wire.messages import (
    Failed,
    Finish,
    FinishReason,
    Prompt,
    Started,
    Submit,
    Text,
    Unknown,
)
from quintet.wire.metrics import Metrics
from quintet.wire.params import SamplingParams, shown
from quintet.wire.pooling import Pooled
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import Topology


class LiveRequests:
    """The live requests of one frontend.

    `quintet.frontend.inbox_handlers` names the method for each message. ``send`` sends a message to a process.
    """

    def __init__(
        self,
        me: WorkerId,
        send: Send,
        config: EngineConfig,
        metrics: Metrics | None = None,
        span: TraceSpan = no_span,
    ) -> None:
        self.me = me
        self._span = span
        metrics = metrics if metrics is not None else Metrics()
        self.metrics = RequestMetrics(metrics)
        self.workers = Workers(me, config.run_dir)
        self.ledger = LoadLedger(self.workers, config)
        self._dispatcher = Dispatcher(self.ledger, send, config)
        self._recovery = LossRecovery(self._dispatcher, metrics)
        # After a deadline a request ends here, without waiting for the engine.
        self._deadlines = DeadlineTimer(lambda stream: self._give_up(stream, expired(stream)))
        self._max_logprobs = config.frontend.max_logprobs
        self._vocab_size = config.model.vocab_size
        self._ids = RequestIds(me.index, me.epoch)
        self._live: dict[int, StreamChoice] = {}
        self._streams: dict[int, Stream] = {}

    @property
    def num_live(self) -> int:
        """Requests that have not ended. A cancelled request counts until the engine confirms."""
        return len(self._streams)

    # --- in ---------------------------------------------------------------------------------------------------

    def checked(self, params: SamplingParams) -> SamplingParams:
        """Return valid parameters with defaults resolved. Raises `RequestError`."""
        return params.checked(self._max_logprobs, self._vocab_size)

    def submit(
        self,
        prompt: Prompt,
        spec: RequestSpec,
        *,
        mailbox: Mailbox | None = None,
        interval: int | None = 1,
        clamp_max_tokens: bool = False,
        session: str = "",
        received: Sequence[Received] = (),
    ) -> Stream:
        """Submit a request and return its output stream; park it while a required worker is missing.

        The parameters of ``spec`` are `checked`; a missing seed is drawn, and a missing arrival is now. ``mailbox``: shared by
        streams of one reader, which is woken at each choice's first token, every ``interval`` tokens and end; only at the end
        if ``interval`` is None. ``clamp_max_tokens``, ``session``: see `Submit`. ``received``: output of each choice that the
        client has from another server, to resume after it.
        """
        if not -(1 << 63) <= spec.priority < 1 << 63:
            message = f"priority is {shown(spec.priority)}; it must be a 64-bit integer."
            raise invalid(message, "priority")
        params = spec.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        arrival_ns = spec.arrival_ns or time.monotonic_ns()
        spec = msgspec.structs.replace(spec, params=params, arrival_ns=arrival_ns)
        submit = Submit(
            self._ids.take(params.n), prompt, spec, 0, 0, clamp_max_tokens=clamp_max_tokens, session=session
        )
        stream = Stream(submit, mailbox or Mailbox(), self.cancel, interval)
        if received:
            stream.resume(received)
        if stream.num_open:  # else another server delivered all of it
            self.begin(stream)
            self.metrics.submitted(params)
        return stream

    def take_ids(self, count: int) -> int:
        """Reserve consecutive ids for requests to resume; return the first."""
        return self._ids.take(count)

    def begin(self, stream: Stream) -> None:
        """Register and dispatch the open choices of a stream."""
        self._streams[stream.request_id] = stream
        open_choices = [choice for choice in stream.choices if choice.finish is None]
        for choice in open_choices:
            self._live[choice.request_id] = choice
        self.ledger.open(stream)
        try:
            self._dispatcher.place(stream)
        except BaseException as error:
            self.ledger.reject(stream)
            del self._streams[stream.request_id]
            for choice in open_choices:
                del self._live[choice.request_id]
            if isinstance(error, UNENCODABLE):
                raise not_encodable(error) from None
            raise
        self.metrics.live.set(len(self._streams))
        if stream.submit.spec.deadline_ns:
            self._deadlines.watch(stream)

    def cancel(self, stream: Stream) -> None:
        if stream.ended or stream.is_cancelled:
            return
        stream.is_cancelled = True
        if not self._dispatcher.send_cancel(stream):
            self._abort_locally(stream)

    def _abort_locally(self, stream: Stream) -> None:
        """End a request locally: the engine never received it or sends no more output."""
        for choice in stream.choices:
            if choice.finish is None:
                finish = Finish(choice.request_id, FinishReason.ABORT, None, len(choice.output_ids))
                self._end_choice(choice, finish, time.monotonic_ns())
        self._post(stream)

    # --- out --------------------------------------------------------------------------------------------------

    def apply_failed(self, failed: Failed) -> None:
        choice = self._live.get(failed.request_id)
        if choice is None:
            self.metrics.duplicate_endings.inc()
            return
        if choice.stream.is_cancelled:  # a cancelled request ends as aborted, even if it fails first
            self._abort_locally(choice.stream)
        else:
            self._fail(choice.stream, RequestError(failed.code, failed.message, failed.param, failed.retry_s))

    def apply_pooled(self, pooled: Pooled) -> None:
        """End a pooling request with its vector, and wake its reader."""
        choice, now = self._live.get(pooled.request_id), time.monotonic_ns()
        if choice is None:
            self.metrics.duplicate_endings.inc()
            return
        stream, arrival_ns = choice.stream, choice.stream.submit.spec.arrival_ns
        stream.vector = pooled.vector
        counts = pooled.num_prompt_tokens, pooled.num_cached_tokens
        self._start(stream, Started(pooled.request_id, *counts, arrival_ns, pooled.scheduled_ns))
        self._end_choice(choice, Finish(pooled.request_id, FinishReason.STOP, None, 0), now)
        self._post(stream)

    def apply_text(self, text: Text) -> None:
        """Apply the output of one step and wake the readers."""
        if self.workers.is_lost(text.sender):
            self.metrics.stale_deltas.inc(len(text.request_ids))
            return
        now = time.monotonic_ns()
        self.metrics.hop.observe((now - text.sent_ns) * 1e-9)
        touched: list[Stream] = []
        for started in text.started:
            choice = self._live.get(started.request_id)
            if choice is None:
                continue
            if choice.stream.started is None:
                self._start(choice.stream, started)
                touched.append(choice.stream)
            elif not self.ledger.is_prefilled(choice.stream):
                self._dispatcher.note_start(choice.stream, started)
        self._apply_rows(text, now, touched)
        for finish in text.finishes:
            choice = self._live.get(finish.request_id)
            if choice is None:
                self.metrics.duplicate_endings.inc()
                continue
            if finish.reason is FinishReason.ABORT and is_expired_by_core(choice.stream, now):
                self._fail(choice.stream, expired(choice.stream))
                continue
            self._end_choice(choice, finish, now)
            touched.append(choice.stream)
        for stream in touched:
            self._post(stream)
        self._span("text", text.step, now)

    def _apply_rows(self, text: Text, now: int, touched: list[Stream]) -> None:
        live, ledger, itl = self._live, self.ledger, self.metrics.inter_token_latency
        ids = unpack_i32(text.token_ids)
        positions = {row.row: row.positions for row in text.logprobs} if text.logprobs else None
        spans = {row.row: row.spans for row in text.spans} if text.spans else None
        at = 0
        rows = zip(
            text.request_ids, text.deltas, text.offsets, text.first_indexes, text.num_tokens, strict=True
        )
        for row, (request_id, delta, offset, first_index, num_tokens) in enumerate(rows):
            begin, at = at, at + num_tokens
            choice = live.get(request_id)
            if choice is None:
                self.metrics.stale_deltas.inc()
                continue
            stream, output_ids = choice.stream, choice.output_ids
            num_chars = offset if choice.num_chars is None else choice.num_chars
            seen_tokens, seen_chars = len(output_ids) - first_index, num_chars - offset
            if seen_tokens < 0 or seen_chars < 0:
                self.give_up([request_id], missing_output_error(choice, first_index, offset))
                continue
            if num_tokens > seen_tokens:
                begin += seen_tokens
                if at - begin == 1:
                    output_ids.append(ids[begin])
                else:
                    output_ids.extend(ids[begin:at])
                ledger.num_received += at - begin
                if positions is not None and row in positions:
                    choice.logprobs += positions[row][seen_tokens:]
                if choice.last_ns:
                    itl.observe((now - choice.last_ns) * 1e-9)
                elif not stream.first_token_ns:
                    stream.first_token_ns = now
                    self.metrics.time_to_first_token.observe((now - stream.submit.spec.arrival_ns) * 1e-9)
                choice.last_ns = now
            elif num_tokens and len(delta) <= seen_chars:
                self.metrics.stale_deltas.inc()
                continue
            if len(delta) > seen_chars:
                choice.texts.append(delta[seen_chars:] if seen_chars else delta)
                if spans is not None and row in spans:
                    choice.note_spans(spans[row], seen_chars)
                num_chars = offset + len(delta)
            choice.num_chars = num_chars
            if not choice.is_dirty:
                stream.touch(choice)
            touched.append(stream)

    def _start(self, stream: Stream, started: Started) -> None:
        stream.note_start(started)
        self._dispatcher.note_start(stream, started)
        self.metrics.prompt_tokens.observe(started.num_prompt_tokens)

    def _end_choice(self, choice: StreamChoice, finish: Finish, now: int) -> None:
        stream = choice.stream
        del self._live[choice.request_id]
        choice.finish = finish
        stream.touch(choice)
        stream.num_open -= 1
        self.ledger.end_choice(stream)
        self.metrics.choice_ended(stream.submit, finish, len(choice.output_ids), stream.first_token_ns, now)
        if stream.num_open == 0:
            self._release(stream)

    def _fail(self, stream: Stream, error: RequestError) -> None:
        """End every running choice of a request with an error."""
        if stream.ended:
            return
        for choice in stream.choices:
            if self._live.pop(choice.request_id, None) is not None:
                self.metrics.success[FinishReason.ERROR].inc()
        stream.num_open = 0
        stream.note_error(error)
        self._release(stream)
        self._post(stream)

    def _release(self, stream: Stream) -> None:
        """Remove a request; every end passes here."""
        del self._streams[stream.request_id]
        self._dispatcher.release(stream)
        self.ledger.close(stream)
        self.metrics.live.set(len(self._streams))

    def _post(self, stream: Stream) -> None:
        if stream.is_closed:
            stream.take()
        elif not stream.is_posted and stream.is_due():
            stream.is_posted = True
            stream.mailbox.post(stream)

    def in_flight_reports(self) -> Iterable[Report]:
        """Return reports of the live requests, for reconciliation in other processes."""
        return reports_of(self.me, self.workers.cores(), self._live.values())

    def resume_unknown(self, unknown: Unknown) -> None:
        """Resume requests that the engine does not know with a new attempt; cancelled ones end."""
        request_ids = unpack_i64(unknown.request_ids)
        choices = [self._live[request_id] for request_id in request_ids if request_id in self._live]
        for stream in dict.fromkeys(choice.stream for choice in choices):
            stream.num_times_unknown += 1
            if stream.is_cancelled:
                self._abort_locally(stream)
            elif stream.num_times_unknown > MAX_TIMES_UNKNOWN:
                self._give_up(stream, unknown_request_error())
            else:
                self._recovery.resume(stream, Role.CORE)
        self._place_parked()

    def give_up(self, request_ids: Sequence[int], error: RequestError) -> None:
        """Fail requests that lost output, here and in the engine."""
        for request_id in request_ids:
            choice = self._live.get(request_id)
            if choice is not None:
                self._give_up(choice.stream, error)

    def _give_up(self, stream: Stream, error: RequestError) -> None:
        """Fail a request, or abort it if it was cancelled."""
        if stream.is_cancelled:
            self._abort_locally(stream)
        else:
            self._dispatcher.send_cancel(stream)
            self._fail(stream, error)

    # --- supervision ------------------------------------------------------------------------------------------

    def follow(self, topology: Topology) -> None:
        """Apply a topology: re-dispatch the requests of lost workers with the output received so far."""
        for stream in self._recovery.follow(topology, self._streams.values()):
            self._give_up(stream, poison_error())
        self._place_parked()

    def _place_parked(self) -> None:
        for stream in self._dispatcher.take_parked():
            try:
                self._dispatcher.place(stream)
            except UNENCODABLE as error:
                self._fail(stream, not_encodable(error))

    def fail_all(self, error: RequestError) -> None:
        """Fail every live request: the process is about to exit."""
        for stream in list(self._streams.values()):
            self._fail(stream, error)
