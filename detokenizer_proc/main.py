"""Main loop of the detokenizer process: receives the cores' tokens, sends text to the frontends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.queries import Queries, failed_query
from quintet.detokenizer_proc.rows import Cores, Steps
from quintet.detokenizer_proc.vocabulary import load_vocabulary
from quintet.process.child import child_main
from quintet.process.pending_topology import PendingTopology
from quintet.process.runtime import Process
from quintet.wire.codec import pack_i32, pack_i64, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import Role, WorkerId, epoch_tag, frontend_of, is_newer
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import DetokenizeQuery, Failed, Live, StopHit, Text, Tokens, Unknown
from quintet.wire.supervision import Drain, Drained, Topology

MAX_QUEUED_TEXTS = 4096
"""Messages queued for frontends that are not in the topology yet. Requests of further messages fail."""

MAX_FAILED = 1 << 16
"""Failed requests kept until their frontend is in the topology."""


class Detokenizer:
    """Message handlers and metrics of the process."""

    def __init__(self, process: Process[Tokens | DetokenizeQuery | Live], table: PieceTable) -> None:
        self._process = process
        self._span = process.span
        self._sender = (process.me.index, process.me.epoch)
        first = Steps(table)
        self._cores = Cores(first)
        self._queries = Queries(process.peers, first, table.num_ids)
        self._queued_texts = PendingTopology[tuple[int, int], tuple[int, int, Text]](MAX_QUEUED_TEXTS)
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

    def run(self) -> None:
        process = self._process
        while True:
            messages = process.receive(0.0 if self._queries.jobs else None)
            # The outboxes already follow a topology of this batch: send queued messages before handling the new ones.
            if any(isinstance(message, Topology) for message in messages):
                self._follow()
            for message in messages:
                self._handle(message)
            for core, hits in self._cores.take_stop_hits():
                self._num_stop_hits.inc(len(hits))
                ids, attempts = zip(*hits, strict=True)
                process.peers.send(Role.CORE, core, StopHit(pack_i64(ids), pack_i32(attempts)))
            if self._queries.jobs:
                self._queries.advance()
            num_open = self._cores.num_open
            process.pending = num_open + len(self._queries.jobs)
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
                self._queries.accept(message)
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
            failed = failed_query(dropped.query_id, error)
            self._process.peers.send(Role.FRONTEND, dropped.frontend, failed)
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
        retired = [slot.worker for slot in self._process.topology.slots if slot.retired]
        gone = [(each.role, each.index, each.epoch - 1) for each in self._process.replaced]
        for role, index, epoch in gone + [(each.role, each.index, each.epoch) for each in retired]:
            if role is Role.FRONTEND:
                self._cores.forget_frontend(index, epoch_tag(epoch + 1))
            elif role is Role.CORE:
                self._cores.forget_core(index, epoch)
        for index, tag, text in self._queued_texts.take():
            self._deliver(index, tag, text)
        self._send_failures()


def _requests_in(text: Text) -> list[int]:
    ids = {*text.request_ids, *(started.request_id for started in text.started)}
    ids.update(finish.request_id for finish in text.finishes)
    return sorted(ids)


def prepare(config: EngineConfig) -> PieceTable:
    """Read the tokenizer and build its table. Raises `ConfigError`.

    Independent of the slot, so a standby process calls it in advance.
    """
    return PieceTable(load_vocabulary(config.model.tokenizer_path, config.model.vocab_size))


def serve(process: Process[Tokens | DetokenizeQuery | Live], table: PieceTable) -> None:
    """Turn tokens into text until stopped."""
    try:
        detokenizer = Detokenizer(process, table)
        process.ready(tokens=str(table.num_ids), style=table.spec.kind)
        detokenizer.run()
    finally:
        process.close()


def run(me: WorkerId, config: EngineConfig, table: PieceTable) -> None:
    """Run the detokenizer process in slot ``me``."""
    serve(Process(me, config, Tokens | DetokenizeQuery | Live), table)


if __name__ == "__main__":
    child_main(Role.DETOKENIZER, run, prepare)
