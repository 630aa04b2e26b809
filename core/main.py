"""Core process: message loop around the engine. The only module of the core that uses sockets and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from quintet.core.engine import Engine
from quintet.core.metrics import CoreMetrics, S
from quintet.core.reconcile import Reconciliation, by_slot
from quintet.core.token_messages import StepMessages
from quintet.process.child import child_main
from quintet.process.kv_publisher import KvPublisher
from quintet.process.pending_topology import PendingTopology
from quintet.process.runtime import Process
from quintet.wire.codec import encode, pack_i64, unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId, frontend_of
from quintet.wire.kv_admin import KvQuery
from quintet.wire.kv_events import KvEventBatch
from quintet.wire.kv_tiers import KvPins, KvTierResults
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import (
    Admit,
    Cancel,
    Failed,
    InFlightReport,
    Live,
    Resume,
    StopHit,
    Tokens,
    Unknown,
)
from quintet.wire.pooling import Pooled
from quintet.wire.step import Capacity, StepResult
from quintet.wire.supervision import Drain, Drained, SlotState, Topology

Message = (
    Admit | Cancel | StopHit | Resume | Live | InFlightReport | Unknown | StepResult
    | Capacity | KvTierResults | KvQuery | KvPins
)  # fmt: skip

REPORT_INTERVAL_NS = 5_000_000_000
"""Interval between reports of live requests to the detokenizers."""

MAX_EARLY = 1 << 14
"""Capacity of the queue of messages that wait for a newer topology."""


class Core:
    """Event loop: receive messages, apply them, plan up to ``max_steps_in_flight`` steps."""

    def __init__(self, process: Process[Message]) -> None:
        config = process.config
        self.process = process
        embeds = config.frontend.prompt_embeds
        self.engine = Engine(config.model, config.cache, config.scheduler, prompt_embeds=embeds)
        peers, speculative = config.cache.peers, config.scheduler.speculative
        self.metrics = CoreMetrics(
            self.process.metrics,
            "" if peers is None else peers.role,
            1 if speculative is None else speculative.num_speculative_tokens,
        )
        self._span = self.process.span
        self._reconciliation = Reconciliation(self.engine)
        self._reported_ns = 0
        self._resumes: list[Resume] = []
        """Queries deferred until the steps in flight have drawn their requests' last tokens."""
        self._is_retiring = False
        """The supervisor requested `Drained` once no request is left."""
        self._early: PendingTopology[int, Admit | Cancel | Resume] = PendingTopology(MAX_EARLY)
        """Keyed by frontend slot."""
        events = config.cache.events
        self._publisher = None if events is None else KvPublisher(events, process.me.index)
        process.account = self._account
        engine, me = self.engine, process.me.index
        self._handlers: dict[type[Message], Callable[[Any, int], None]] = {
            StepResult: self._apply_result,
            Admit: self._admit,
            Cancel: self._cancel,
            StopHit: lambda hit, now: engine.stop_hit(
                unpack_i64(hit.request_ids), unpack_i32(hit.attempts), now
            ),
            Resume: self._resume,
            Live: self._reconcile,
            InFlightReport: self._reconcile_path,
            Unknown: lambda message, now: self._send_unknown(unpack_i64(message.request_ids)),
            KvTierResults: lambda message, now: engine.kv_results(message),
            KvQuery: lambda message, now: engine.kv_admin.take(message, me),
            KvPins: lambda message, now: engine.kv_admin.restore_pins(message),
            Capacity: self._apply_capacity,
        }

    def run(self) -> None:
        """Serve until the process is stopped."""
        scheduler = self.process.config.scheduler
        self.process.ready(policy=scheduler.policy, max_steps_in_flight=str(scheduler.max_steps_in_flight))
        try:
            while True:
                self.apply(self.process.receive())
        except Exception:
            self.process.log.critical("%s", self.engine.describe())
            raise
        finally:
            try:
                self._account()
            finally:
                if self._publisher is not None:
                    self._publisher.close()
                self.process.close()

    def apply(self, messages: list[Message | Topology | Dropped | Drain]) -> None:
        """Apply messages in order, then plan. A new topology is applied first, because the outboxes already follow it."""
        if any(isinstance(message, Topology) for message in messages):
            self._follow_topology(self.process.topology)
        for message in messages:
            if isinstance(message, Admit | Cancel | Resume):
                self._handle_or_queue(message)
            elif isinstance(message, Dropped):
                if message.kind == Capacity.__struct_config__.tag:
                    raise RuntimeError(
                        "the executor's Capacity message is invalid; the core cannot schedule without it"
                    )
                self._send(self.engine.end_dropped(message, self.process.now_ns))
            elif isinstance(message, Drain):
                self._is_retiring = True
            elif not isinstance(message, Topology):
                self._handle(message)
        self._send(self.engine.expire(self.process.now_ns))
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            self._resume(resume, self.process.now_ns)
        if self.engine.kv_admin.queries:
            self.engine.kv_admin.advance(self.engine.state, self.process.now_ns)
        self._plan()
        self._publish()
        self._report_live()
        self._note_endings()
        if self._is_retiring and not self.engine.is_needed and not self._early.waiting:
            self._is_retiring = False  # sent once per Drain
            self.process.peers.send(Role.SUPERVISOR, 0, Drained(self.process.me))

    def _handle_or_queue(self, message: Admit | Cancel | Resume) -> None:
        """Handle a frontend's message, or queue it until its topology arrives. Queues of frontends are independent."""
        sender = frontend_index(message)
        if sender not in self._early.waiting and not self._is_early(message):
            self._handle(message)
        elif not self._early.enqueue(sender, message):
            self._reject(message)

    def _reject(self, message: Admit | Cancel | Resume) -> None:
        """Reject a message, since the queue of early messages is full. A `Resume` gets no answer: its frontend resends it."""
        self.process.log.warning(
            "rejecting a message: %d messages already wait for a newer topology", MAX_EARLY
        )
        match message:
            case Admit():
                words = "The server's queue of requests that wait for a topology update is full; retry the request."
                failed = Failed(message.request_id, ErrorCode.OVERLOADED, words)
                self.process.peers.send(Role.FRONTEND, frontend_index(message), failed)
            case Cancel():
                self._send_unknown(message.request_ids)

    def _is_early(self, message: Admit | Cancel | Resume) -> bool:
        """Return True when the message was sent under a newer topology than ours: answers to it might be lost."""
        if isinstance(message, Cancel):
            return False
        version = message.spec.topology if isinstance(message, Admit) else message.topology
        return version > self.process.topology.version

    def _handle(self, message: Message) -> None:
        """Apply one message and send the resulting messages."""
        handler = self._handlers.get(type(message))  # None for those of every process, handled already
        if handler is not None:
            handler(message, self.process.now_ns)

    def _apply_result(self, result: StepResult, now: int) -> None:
        start_ns = time.monotonic_ns()
        self.metrics.hop_result.observe(max(0, now - result.sent_ns) * S)
        state = self.engine.state
        if state is None or not state.in_flight or state.in_flight[0].step != result.step:
            return  # its plan was forgotten when the executor was replaced
        self._compare_active_slots(result, state.in_flight[0].num_active_slots)
        self.process.progress += 1
        counters = state.counters
        num_before = counters.computed_tokens + counters.first_tokens
        effects = self.engine.commit(result, now)
        # A decoded token is counted where its predecessor is computed, so that each counts once.
        self.metrics.step_tokens.observe(counters.computed_tokens + counters.first_tokens - num_before)
        self._span("commit", result.step, start_ns)
        self._send(effects)
        self._span("send")
        self.metrics.commit.observe((time.monotonic_ns() - start_ns) * S)

    def _admit(self, admit: Admit, now: int) -> None:
        start_ns = time.monotonic_ns()
        self.metrics.hop_in.observe(max(0, now - admit.sent_ns) * S)
        self._send(self.engine.admit(admit, now))
        self._span("admit", len(admit.prompt_ids), start_ns)

    def _cancel(self, cancel: Cancel, now: int) -> None:
        if cancel.moved:
            self._send(self.engine.forget_moved(cancel.request_ids, now))
        else:
            self._send(self.engine.cancel(cancel.request_ids, now, keep=cancel.keep))

    def _apply_capacity(self, capacity: Capacity, now: int) -> None:
        """Start on an executor with empty tables, and log its size and the failure that emptied them."""
        self.process.log.info(
            "executor epoch %d has %d blocks of %d tokens, %d slots",
            capacity.executor_epoch, capacity.num_blocks, capacity.block_size, capacity.max_num_seqs,
        )  # fmt: skip
        effects = self.engine.capacity(capacity, now)
        if capacity.failure or self.engine.suspects.trial is not None:
            self.process.log.warning(
                "the executor %s; %s", f"failed in a step: {capacity.failure}" if capacity.failure else "died",
                self.engine.suspects.describe(),
            )  # fmt: skip
        for failed in effects.failed:
            self.process.log.error("request %d ends: %s", failed.request_id, failed.message)
        self._send(effects)
        if self.engine.state is not None:
            self.metrics.note_limits(self.engine.state.limits)
            self.process.send_metrics()

    def _resume(self, message: Resume, now: int) -> None:
        answer, effects = self.engine.resume(message, now)
        self._send(effects)
        if answer is None:
            self._resumes.append(message)
        else:
            answer.core = self.process.me.index
            self.process.peers.send(Role.FRONTEND, message.frontend, answer)

    def _reconcile(self, account: Live, now: int) -> None:
        """Drop requests that are alive here but unknown to their frontend."""
        orphans = self._reconciliation.orphans(account)
        if orphans:
            self._note_differences("alive here, but unknown to their frontend", orphans)
            self._send(self.engine.drop(orphans, now))

    def _reconcile_path(self, account: InFlightReport, now: int) -> None:
        """Report forwarded requests that are not alive here as unknown, so that their frontend resends them."""
        if self.engine.state is None or account.sender.index in self._early.waiting:
            return  # the requests may be queued here
        unknown = self._reconciliation.unknown(account)
        if unknown:
            self._note_differences("awaited by a frontend, but not alive here", unknown)
            self._send_unknown(unknown)

    def _compare_active_slots(self, result: StepResult, num_active_slots: int) -> None:
        if result.num_active_slots is not None and result.num_active_slots != num_active_slots:
            self.metrics.request_state_mismatches.inc(abs(result.num_active_slots - num_active_slots))
            self.process.log.warning(
                "step %d: executor has %d active slots, core %d",
                result.step,
                result.num_active_slots,
                num_active_slots,
            )

    def _note_differences(self, what: str, request_ids: Sequence[int]) -> None:
        self.metrics.request_state_mismatches.inc(len(request_ids))
        self.process.log.warning("%d requests are %s: %s", len(request_ids), what, list(request_ids[:8]))

    def _send_unknown(self, request_ids: Sequence[int]) -> None:
        """Send `Unknown` to the frontends of these requests, so that they resend them."""
        if not request_ids:
            return
        slots = by_slot((frontend_of(request_id)[0], request_id) for request_id in request_ids)
        for index, ids in slots.items():
            self.process.peers.send(Role.FRONTEND, index, Unknown(pack_i64(ids)))

    def _report_live(self) -> None:
        """Send each detokenizer the list of its live requests, every `REPORT_INTERVAL_NS`."""
        now = self.process.now_ns
        if now - self._reported_ns < REPORT_INTERVAL_NS:
            return
        self._reported_ns = now
        kept = by_slot(self.engine.opened())
        for slot in self.process.topology.slots:
            if slot.worker.role is Role.DETOKENIZER and slot.state is not SlotState.DOWN:
                ids = kept.get(slot.worker.index, [])
                account = Live(self.process.me, pack_i64(ids))
                self.process.peers.send(Role.DETOKENIZER, slot.worker.index, account)

    def _plan(self) -> None:
        """Send plans until ``max_steps_in_flight`` is reached, no work is left, or the executor's epoch is not the known one."""
        peers = self.process.peers
        executor = self.process.me.index
        if not self._has_executor():
            return
        self._send_transfers()
        while True:
            start = time.monotonic_ns()
            plan = self.engine.plan(self.process.now_ns)
            if plan is None:
                self._send_transfers()
                return
            plan.sent_ns = time.monotonic_ns()
            self._span("plan", plan.step, start, plan.sent_ns)
            peers.send(Role.EXECUTOR, executor, plan)
            self._span("send")
            self.metrics.plan.observe((time.monotonic_ns() - start) * S)
            self._send_transfers()

    def _publish(self) -> None:
        """Send finished prefix exports to frontends and publish this iteration's KV events."""
        files = self.engine.kv_admin.files
        for frontend, report in files.take_done() if files.done else ():
            self.process.peers.send(Role.FRONTEND, frontend, report)
        state = self.engine.state
        events = None if state is None or state.events is None else state.events.take()
        if events and self._publisher is not None:
            batch = KvEventBatch(time.time(), events, self.process.me.index)
            self._publisher.publish(encode(batch))

    def _send_transfers(self) -> None:
        """Send KV transfers: after the plans that write a block, before any plan that could overwrite it."""
        for message in self.engine.kv_requests(self.process.now_ns):
            self.process.peers.send(Role.EXECUTOR, self.process.me.index, message)
        if self.engine.kv_admin.has_changes:
            pins = self.engine.kv_admin.take_changes()
            self.process.peers.send(Role.EXECUTOR, self.process.me.index, pins)

    def _send(self, effects: StepMessages) -> None:
        peers = self.process.peers
        for detokenizer, tokens in effects.tokens:
            tokens.core, tokens.core_epoch = self.process.me.index, self.process.me.epoch
            tokens.sent_ns = time.monotonic_ns()
            try:
                peers.send(Role.DETOKENIZER, detokenizer, tokens)
            except FrameTooLarge as error:
                self._end_oversized(tokens, error)
        answers: list[Failed | Pooled] = [*effects.failed, *effects.pooled]
        for answer in answers:
            peers.send(Role.FRONTEND, frontend_of(answer.request_id)[0], answer)
        self._send_unknown(effects.unknown)

    def _end_oversized(self, tokens: Tokens, error: FrameTooLarge) -> None:
        """End the requests of a `Tokens` message that exceeds the frame limit."""
        ids = [*unpack_i64(tokens.request_ids), *(opened.request_id for opened in tokens.opens)]
        words = f"Step output exceeds the message size limit: {error}. Request fewer log-probabilities."
        lost = RequestError(ErrorCode.TOO_LARGE, words)
        self._send(self.engine.fail(ids, lost, self.process.now_ns))

    def _follow_topology(self, topology: Topology) -> None:
        """Abandon requests of replaced frontends, then handle queued messages."""
        now = self.process.now_ns
        for slot in topology.slots:
            worker = slot.worker
            if worker.role is Role.FRONTEND:
                self.engine.abandon(worker.index, worker.epoch, now, down=slot.state is SlotState.DOWN)
        for message in self._early.take():
            self._handle_or_queue(message)

    def _note_endings(self) -> None:
        """Report the requests that ended in this iteration, and the number that is pending."""
        state = self.engine.state
        is_ours = self._has_executor() and not (state is not None and state.is_waiting_for_contents)
        self.process.pending = self.engine.num_live if is_ours else 0
        if state is not None and (state.endings or state.queue_times_ns):
            self.metrics.note_endings(state, self.process.now_ns)

    def _account(self) -> tuple[int, int]:
        """Update the gauges and return ``(progress, pending)`` for the heartbeat."""
        if self.engine.state is not None:
            self.metrics.note_state(self.engine.state)
        return self.process.progress, self.process.pending

    def _has_executor(self) -> bool:
        """Return True when the connected executor has the known epoch. Waiting for another is not a stall of the core."""
        known = self.engine.executor_epoch
        return known is not None and self.process.peers.epoch(Role.EXECUTOR, self.process.me.index) == known


def frontend_index(message: Admit | Cancel | Resume) -> int:
    match message:
        case Resume():
            return message.frontend
        case Admit():
            return frontend_of(message.request_id)[0]
        case _:
            return frontend_of(message.request_ids[0])[0] if message.request_ids else 0


def run(me: WorkerId, config: EngineConfig) -> None:
    Core(Process(me, config, Message)).run()


if __name__ == "__main__":
    child_main(Role.CORE, run)
