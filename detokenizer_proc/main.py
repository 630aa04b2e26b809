"""Main loop of the detokenizer process: receives the cores' tokens, sends text to the frontends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.rows import Cores, Steps
from quintet.detokenizer_proc.text_state import TextState
from quintet.detokenizer_proc.vocabulary import load_vocabulary
from quintet.process.pending_topology import PendingTopology
from quintet.process.runtime import Process, child_main
from quintet.wire.codec import pack_i32, pack_i64, unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.dropped import Dropped
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId, epoch_tag, frontend_of, is_newer
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import (
    Detokenized,
    DetokenizeQuery,
    Failed,
    Live,
    Open,
    StopHit,
    Text,
    Tokens,
    Unknown,
)
from quintet.wire.params import check_token_ids
from quintet.wire.request import Echo
from quintet.wire.supervision import Drain, Drained, Topology

QUERY_SLICE = 4096
"""Tokens of a `DetokenizeQuery` decoded per loop iteration; bounds the delay of a step by a query."""

MAX_QUEUED_TEXTS = 4096
"""Messages queued for frontends that are not in the topology yet. Requests of further messages fail."""

MAX_FAILED = 1 << 16
"""Failed requests kept until their frontend is in the topology."""


class QueryJob:
    """A `DetokenizeQuery` in progress, decoded in slices."""

    def __init__(self, query: DetokenizeQuery, token_ids: Sequence[int], state: TextState) -> None:
        self.query = query
        self._token_ids = token_ids
        self._state = state
        self._position = 0
        self._parts: list[str] = []

    def advance(self) -> Detokenized | None:
        """Decode one slice; return the answer after the last slice."""
        state, end = self._state, self._position + QUERY_SLICE
        self._parts.append(state.add(self._token_ids[self._position : end]))
        self._position = end
        if end < len(self._token_ids) and state.hit is None:
            return None
        if state.hit is None:
            self._parts.append(state.finish(is_cut=self.query.is_cut))
        answer = Detokenized(self.query.query_id, "".join(self._parts))
        reader = state.reader
        if reader is not None:
            answer.spans = reader.take_spans()
            answer.num_reasoning_tokens, answer.num_calls = reader.num_reasoning_tokens, reader.num_calls
        return answer


def _open_without_request(query_id: int) -> Open:
    """Return the `Open` of a text without a request: empty prompt, special tokens shown."""
    return Open(query_id, 0, 0, b"", [], False, False, True, True, Echo.NONE, False, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of the tokenizer; independent of the slot."""

    showing: PieceTable
    skipping: PieceTable
    """Table without special tokens."""


class Detokenizer:
    """Message handlers and metrics of the process."""

    def __init__(self, process: Process[Tokens | DetokenizeQuery | Live], tables: Tables) -> None:
        self._process = process
        self._span = process.span
        self._sender = (process.me.index, process.me.epoch)
        self._showing, self._skipping = tables.showing, tables.skipping
        self._first = Steps(self._skipping, self._showing)
        self._cores = Cores(self._first)
        self._jobs: deque[QueryJob] = deque()
        self._queued_texts: PendingTopology[tuple[int, int], tuple[int, int, Text]] = PendingTopology(
            MAX_QUEUED_TEXTS
        )
        self._is_retiring = False
        """True after `Drain`, until `Drained` is sent."""
        self._failed: dict[int, Failed] = {}
        """Errors to send to the frontends of requests with dropped tokens or text."""
        metrics = process.metrics
        self._hop = metrics.histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="core_detokenizer"
        )
        self._seconds = metrics.histogram("detokenize_seconds", "Time to turn one step's tokens into text.")
        self._num_tokens = metrics.counter("detokenized_tokens", "Tokens turned into text.")
        self._num_stop_hits = metrics.counter("stop_string_hits", "Requests ended by a stop string.")
        self._num_differences = metrics.counter(
            "request_state_mismatches", "Requests open in only one of two processes, twice in a row."
        )
        self._num_open = metrics.gauge("detokenizer_open_requests", "Requests open in the detokenizer.")

    @property
    def vocab_size(self) -> int:
        """Number of ids in the tables."""
        return self._showing.num_ids

    @property
    def style(self) -> str:
        """Decoder type: ``bytes``, ``pieces``, ``metaspace`` or ``library``."""
        return self._showing.spec.kind

    def run(self) -> None:
        """Handle messages until stopped."""
        process = self._process
        while True:
            messages = process.receive(0.0 if self._jobs else None)
            # The outboxes already follow a topology of this batch: send queued messages before handling the new ones.
            if any(isinstance(message, Topology) for message in messages):
                self._follow()
            for message in messages:
                self._handle(message)
            for core, hits in self._cores.take_stop_hits():
                self._num_stop_hits.inc(len(hits))
                ids, attempts = zip(*hits, strict=True)
                process.peers.send(Role.CORE, core, StopHit(pack_i64(ids), pack_i32(attempts)))
            if self._jobs:
                self._advance_query()
            num_open = self._cores.num_open
            process.pending = num_open + len(self._jobs)
            self._num_open.set(num_open)
            # Count each iteration as progress: an open request without new tokens is not a stall of this process.
            process.progress += 1
            if self._is_retiring and not process.pending:
                self._is_retiring = False  # send Drained once
                process.peers.send(Role.SUPERVISOR, 0, Drained(process.me))

    def _handle(self, message: object) -> None:
        match message:
            case Tokens():
                self._apply(message)
            case DetokenizeQuery():
                self._accept_query(message)
            case Live():
                self._reconcile(message)
            case Dropped():
                self._fail_dropped(message)
            case Drain():
                self._is_retiring = True
            case _:
                pass

    def _fail_dropped(self, dropped: Dropped) -> None:
        """Fail the query and the requests of a dropped message."""
        error = dropped.error(Role.DETOKENIZER)
        if dropped.query_id is not None and dropped.frontend is not None:
            failed = Failed(dropped.query_id, error.code, error.message)
            answer = Detokenized(dropped.query_id, "", failed)
            self._process.peers.send(Role.FRONTEND, dropped.frontend, answer)
        self._fail_requests(dropped.request_ids, error.code, error.message)
        self._send_failures()

    def _reconcile(self, live: Live) -> None:
        stale, missing = self._cores.of(live.sender.index).compare(unpack_i64(live.request_ids))
        if stale or missing:
            self._num_differences.inc(len(stale) + len(missing))
            self._process.log.warning(
                "reconcile with core %d: %d requests open only in the detokenizer, %d only in the core: %s",
                live.sender.index, len(stale), len(missing), [*stale, *missing][:8],
            )  # fmt: skip
        if missing:
            self._process.peers.send(Role.CORE, live.sender.index, Unknown(pack_i64(missing)))

    def _apply(self, message: Tokens) -> None:
        began_ns = time.monotonic_ns()
        self._hop.observe((began_ns - message.sent_ns) / 1e9)
        for builder, text in self._cores.apply(message):
            text.sender = self._sender
            self._deliver(builder.index, builder.epoch_tag, text)
        num_tokens = len(message.token_ids) // 4
        self._num_tokens.inc(num_tokens)
        self._process.progress += num_tokens
        self._seconds.observe((time.monotonic_ns() - began_ns) / 1e9)
        self._span("detokenize", message.step, began_ns)

    def _deliver(self, index: int, tag: int, text: Text) -> None:
        """Send to the frontend of this epoch. Drop for a replaced frontend; queue for one not in the topology yet."""
        epoch = self._process.peers.epoch(Role.FRONTEND, index)
        if epoch is not None and epoch_tag(epoch) == tag:
            try:
                self._process.peers.send(Role.FRONTEND, index, text)
            except FrameTooLarge as error:
                cause = (
                    f"Step output exceeds the message size limit: {error}. Request fewer log-probabilities."
                )
                self._fail_requests(_requests_in(text), ErrorCode.TOO_LARGE, cause)
                self._send_failures()
        elif (epoch is None or is_newer(tag, epoch)) and not self._queued_texts.enqueue(
            (index, tag), (index, tag, text)
        ):
            self._fail_text(text)

    def _fail_text(self, text: Text) -> None:
        """Drop a message to an unknown frontend, and fail its requests."""
        if not self._failed:
            self._process.log.warning(
                "%d messages queued for frontends that are not in the topology; requests of further messages fail",
                MAX_QUEUED_TEXTS,
            )
        message = "The output was lost inside the server while a frontend started; retry the request."
        self._fail_requests(_requests_in(text), ErrorCode.UNAVAILABLE, message)

    def _fail_requests(self, request_ids: Sequence[int], code: ErrorCode, message: str) -> None:
        """Fail requests with lost text: later text would follow a gap."""
        self._cores.abandon(request_ids)
        for request_id in request_ids:
            self._failed[request_id] = Failed(request_id, code, message)
            if len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]

    def _send_failures(self) -> None:
        """Send the errors of lost requests to known frontends; keep those of unknown frontends."""
        lost, self._failed = self._failed, {}
        for request_id, failed in lost.items():
            index, tag = frontend_of(request_id)
            epoch = self._process.peers.epoch(Role.FRONTEND, index)
            if epoch is None or is_newer(tag, epoch):
                self._failed[request_id] = failed
            elif epoch_tag(epoch) == tag:
                self._process.peers.send(Role.FRONTEND, index, failed)

    def _follow(self) -> None:
        """Apply a new topology: drop requests of replaced frontends and cores, then send queued messages."""
        for worker in self._process.replaced:
            if worker.role is Role.FRONTEND:
                self._cores.forget_frontend(worker.index, epoch_tag(worker.epoch))
            elif worker.role is Role.CORE:
                self._cores.forget_core(worker.index, worker.epoch - 1)
        for slot in self._process.topology.slots:
            if slot.retired and slot.worker.role is Role.FRONTEND:
                self._cores.forget_frontend(slot.worker.index, epoch_tag(slot.worker.epoch + 1))
            elif slot.retired and slot.worker.role is Role.CORE:
                self._cores.forget_core(slot.worker.index, slot.worker.epoch)
        for index, tag, text in self._queued_texts.take():
            self._deliver(index, tag, text)
        self._send_failures()

    def _accept_query(self, query: DetokenizeQuery) -> None:
        token_ids = unpack_i32(query.token_ids)
        try:
            check_token_ids(token_ids, self.vocab_size, "tokens")
        except RequestError as error:
            failed = Failed(query.query_id, error.code, error.message, error.param)
            self._process.peers.send(Role.FRONTEND, query.frontend, Detokenized(query.query_id, "", failed))
            return
        state = self._first.text_state(query.opened or _open_without_request(query.query_id))
        self._jobs.append(QueryJob(query, token_ids, state))

    def _advance_query(self) -> None:
        job = self._jobs.popleft()
        answer = job.advance()
        if answer is None:
            self._jobs.append(job)
        else:
            self._answer(job.query, answer)

    def _answer(self, query: DetokenizeQuery, answer: Detokenized) -> None:
        try:
            self._process.peers.send(Role.FRONTEND, query.frontend, answer)
        except FrameTooLarge as error:
            cause = f"The text has {error.num_bytes} bytes, but at most {error.most} are allowed; send fewer tokens."
            failed = Failed(query.query_id, ErrorCode.TOO_LARGE, cause, "tokens")
            self._process.peers.send(Role.FRONTEND, query.frontend, Detokenized(query.query_id, "", failed))


def _requests_in(text: Text) -> list[int]:
    ids = {*text.request_ids, *(started.request_id for started in text.started)}
    ids.update(finish.request_id for finish in text.finishes)
    return sorted(ids)


def prepare(config: EngineConfig) -> Tables:
    """Load the tables. Independent of the slot, so a standby process calls it in advance."""
    return tables_of(config.model)


def tables_of(model: ModelConfig) -> Tables:
    """Read the tokenizer and build its tables. Raises `ConfigError`."""
    showing = PieceTable(load_vocabulary(model.tokenizer_path, model.vocab_size))
    return Tables(showing, showing.skipping_special_tokens())


def serve(process: Process[Tokens | DetokenizeQuery | Live], tables: Tables) -> None:
    """Turn tokens into text until stopped."""
    try:
        detokenizer = Detokenizer(process, tables)
        process.ready(tokens=str(detokenizer.vocab_size), style=detokenizer.style)
        detokenizer.run()
    finally:
        process.close()


def run(me: WorkerId, config: EngineConfig, tables: Tables) -> None:
    """Run the detokenizer process in slot ``me``."""
    serve(Process(me, config, Tokens | DetokenizeQuery | Live), tables)


if __name__ == "__main__":
    child_main(Role.DETOKENIZER, run, prepare)
