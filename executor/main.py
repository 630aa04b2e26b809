"""The executor's loop: plans in, results out, in the same order.

A plan is begun as soon as it is here, even while those before it are computed: the core decides how many there may be
(`SchedulerConfig.depth`). Owns the choice of worker and the handshake with the core (`Capacity`). Knows nothing of
tensors, nor whose fault it is when a step raises: it empties the tables and tells the core, which finds out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable

from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.checkpoints.weights.read_ahead import read_ahead, reserve_ahead
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.expert_metrics import ExpertFigures
from quintet.executor.in_flight import Begun, InFlight
from quintet.executor.interface import Finished, StepWorker
from quintet.executor.kv_transfer.kv_connector_loop import kv_talk, own_places
from quintet.executor.model_config.share import share_of
from quintet.process.runtime import Process, child_main
from quintet.process.trace import Span
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_admin import KvPins
from quintet.wire.kv_disk import DiskResultsReady, KvTierRequests
from quintet.wire.limits import FrameTooLarge
from quintet.wire.step import Capacity, StepPlan, StepsEnded
from quintet.wire.supervision import Topology

WORKERS = {
    "torch": "quintet.executor.worker:make_worker",
    "mock": "quintet.executor.mock:make_worker",
}
"""``ExecutorConfig.kind`` to the function that makes the worker. Imported when chosen: the mock needs no torch."""

LEADERS = {
    "cpu": "quintet.executor.distributed.parallel.leader:make_leading_worker",
    "cuda": "quintet.executor.backends.cuda.leader:make_leading_worker",
}
"""Likewise, of an executor with several ranks, by ``ExecutorConfig.device``; the function takes the others as well."""

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Read by libraries that a worker loads: OpenMP threads sleep between parallel regions instead of spinning on cores the
other processes need; torch asks for huge pages for large tensors. What the user has set stays."""

MAX_FAILURES_ALONE = 8
"""Steps of one request each that raise, without one step that succeeds between them: after the last, it is not the
requests. The core never runs one of them again, so they are different ones."""

MAX_FAILURE_CHARS = 200


def begin_imports() -> None:
    """Begin to import what a real worker needs, from a thread: the configuration is made meanwhile.

    `make_worker` waits for the thread, as whoever imports what is being imported does. An import that fails is tried there
    again, and raises there.
    """
    _set_environment()
    gc.disable()  # see `make_worker`
    module, _, _ = WORKERS["torch"].partition(":")
    threading.Thread(target=_import_quietly, args=(module,), name="imports", daemon=True).start()


def _import_quietly(module: str) -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(module)


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def make_worker(config: EngineConfig, span: Span, followers: FollowerProcesses | None = None) -> StepWorker:
    """Import and build the worker that the configuration names; with ``followers``, one that has other ranks compute too."""
    _set_environment()
    ahead = None
    if config.executor.kind == "torch" and config.executor.load_format == "auto":
        read_ahead(config, share_of(config.executor, 0).label)
        ahead = reserve_ahead(config)
    path = LEADERS[config.executor.device] if followers else WORKERS[config.executor.kind]
    module, _, function = path.partition(":")
    gc.disable()  # importing torch makes a million objects that stay: looking through them takes a seventh of its second
    make: Callable[..., StepWorker] = getattr(importlib.import_module(module), function)
    gc.enable()
    if followers is not None:
        return make(config, span, followers)
    return make(config, span) if ahead is None else make(config, span, ahead)


Message = StepPlan | KvTierRequests | KvPins


class Executor:
    """The slot and the worker, which core they serve, and what is in flight between them."""

    def __init__(self, process: Process[Message], worker: StepWorker) -> None:
        self._process = process
        self._worker = worker
        self._span = process.span
        self._in_flight = InFlight(process.inbox)
        self._kv_talk = kv_talk(process, worker)
        self._core_epoch: int | None = None
        self._last_step: int | None = None
        """The newest plan that came from this core, or was dropped."""
        self._pins = KvPins([])
        """What is pinned, for a core that is to come."""
        self._num_emptied = 0
        self._num_failed_alone = 0
        self._ended_ns = time.monotonic_ns()
        self._steps = process.metrics.counter("executor_steps", "Steps executed.")
        self._wait_s = process.metrics.histogram(
            "executor_wait_seconds", "Time between the end of a step and the start of the next."
        )
        self._compute_s = process.metrics.histogram("executor_compute_seconds", "Time in model and sampler.")
        self._gap_s = process.metrics.histogram(
            "executor_device_gap_seconds", "Time in which the device had nothing to do before a step."
        )
        self._hop_s = process.metrics.histogram(
            "executor_plan_hop_seconds",
            "Time from a plan's sending until the executor began it or was free to.",
        )
        self._failures = process.metrics.counter("executor_step_failures", "Steps that raised.")
        self._split = process.metrics.counter(
            "executor_steps_split", "Steps computed in parts, because memory ran out."
        )

        counts = worker.experts
        self._experts = None if counts is None else ExpertFigures(process.metrics, counts)

    def account(self) -> tuple[int, int]:
        """Return progress and pending work; called from the thread that sends heartbeats, in the middle of a step."""
        return self._process.progress + self._worker.work_done, self._process.pending

    def turn(self) -> None:
        """Wait for messages and handle them; while nobody waits for us, do what is better done before somebody does."""
        if self._in_flight or not self._worker.has_chores:
            self.handle(self._process.receive())
            return
        messages = self._process.receive(0.0)
        if messages:
            self.handle(messages)
        else:
            self._do_chore()

    def _do_chore(self) -> None:
        """Count it among the work: heartbeats have to tell of one that does not end, since ranks wait for each other in it."""
        self._process.pending += 1
        self._worker.do_chore()
        self._process.progress += 1
        self._process.pending -= 1

    def handle(self, messages: list[Message | StepsEnded | DiskResultsReady | Topology | Dropped]) -> None:
        """Send the results of the steps that ended, then begin the plans among ``messages``, all in order.

        When the core's epoch changed, every plan of the batch is from the core that is gone: the new one sends its
        first plan only after it has our `Capacity`.
        """
        is_new_core = self._follow_core()
        plans: list[StepPlan | KvTierRequests | Dropped] = []
        for message in messages:
            if isinstance(message, StepPlan) or (isinstance(message, Dropped) and self._is_next(message)):
                plans.append(message)
                self._last_step = message.step
            elif isinstance(message, KvTierRequests):
                plans.append(message)
            elif isinstance(message, KvPins):
                self._pins = message
            elif isinstance(message, DiskResultsReady) and self._kv_talk is not None:
                self._kv_talk.answer()
            elif isinstance(message, StepsEnded):
                for begun in self._in_flight.ended(message.count):
                    self._end(begun)
        if is_new_core:
            self._last_step = None
            return
        self._process.pending += sum(not isinstance(plan, KvTierRequests) for plan in plans)
        for plan in plans:
            if isinstance(plan, KvTierRequests):
                if self._kv_talk is not None and plan.tables == self._num_emptied:
                    self._kv_talk.order(plan)
            elif plan.tables != self._num_emptied:
                self._process.pending -= 1
            elif isinstance(plan, Dropped):
                self._fail_dropped(plan)
            else:
                self._begin(plan)

    def _is_next(self, dropped: Dropped) -> bool:
        """Whether what was dropped is the plan that had to come: the core waits for its result."""
        return dropped.step is not None and self._last_step in (None, dropped.step - 1)

    def _fail_dropped(self, dropped: Dropped) -> None:
        """Fail a plan that the inbox dropped, as if it had raised: the core finds out for whose sake it cannot be."""
        assert dropped.step is not None
        self._settle_in_flight()
        if dropped.tables == self._num_emptied:
            words = "its step could not be told to the executor: lengths or numbers that cannot be"
            self._failed(dropped.step, 0, ValueError(words))
        else:
            self._process.pending -= 1

    def close(self) -> None:
        """Stop waiting for the device, the disk, and other servers."""
        self._in_flight.close()
        if self._kv_talk is not None:
            self._kv_talk.close()

    def _begin(self, plan: StepPlan) -> None:
        """Have a plan computed. A step that is over at once is settled at once, unless others are before it."""
        self._settle_before(plan)
        if plan.tables != self._num_emptied:
            self._process.pending -= 1  # one of those failed
            return
        free_ns, begun_ns = self._ended_ns, time.monotonic_ns()
        self._span("wait", plan.step, None, begun_ns)
        try:
            pending = self._worker.begin(plan)
        except Exception as error:  # noqa: BLE001 - whatever a request made it raise, the others can go on
            self._settle_in_flight()
            if plan.tables == self._num_emptied:
                self._failed(plan.step, len(plan.slots) // 4, error)
            else:
                self._process.pending -= 1
            return
        begun = Begun(plan, pending, self._worker.num_tenants, free_ns, begun_ns)
        # Not "has it ended?": a recorded executor must settle in the same turn as it did then.
        if isinstance(pending, Finished) and not self._in_flight:
            self._end(begun)
        else:
            self._in_flight.add(begun)

    def _settle_before(self, plan: StepPlan) -> None:
        """Send the results of the steps that have to be over before this one begins."""
        if self._worker.waits_for(plan):
            for before in self._in_flight.unsettled():
                self._end(before)
                if not self._worker.waits_for(plan):
                    break

    def _settle_in_flight(self) -> None:
        """Send the results of the steps before one that failed: what it did does not speak against them."""
        for before in self._in_flight.unsettled():
            self._end(before)

    def _end(self, begun: Begun) -> None:
        """Send the result of the oldest step in flight, or find out why there is none."""
        process, plan, pending = self._process, begun.plan, begun.pending
        try:
            pending.wait()
            result = pending.result()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(plan.step, len(plan.slots) // 4, error)
            return
        self._num_failed_alone = 0
        free_ns = max(begun.begun_ns, self._ended_ns)
        self._ended_ns = ended_ns = time.monotonic_ns()
        device_ms, gap_ms = pending.device_ms, pending.gap_ms
        result.num_tenants = begun.num_tenants
        result.wait_ns = begun.begun_ns - begun.free_ns if gap_ms is None else round(gap_ms * 1e6)
        result.compute_ns = ended_ns - free_ns if device_ms is None else round(device_ms * 1e6)
        if device_ms is not None:
            self._span("device", plan.step, ended_ns - result.compute_ns, ended_ns)
        result.sent_ns = ended_ns
        try:
            process.peers.send(Role.CORE, process.me.index, result)
        except FrameTooLarge as error:
            self._failed(plan.step, len(plan.slots) // 4, error)
            return
        self._span("send", plan.step, ended_ns)
        process.progress += 1
        process.pending -= 1
        self._steps.inc()
        self._split.value = self._worker.num_split
        if self._experts is not None:
            self._experts.note_step()
        self._wait_s.observe(result.wait_ns * 1e-9)
        self._compute_s.observe(result.compute_ns * 1e-9)
        if gap_ms is not None:
            self._gap_s.observe(gap_ms * 1e-3)
        if plan.sent_ns >= begun.free_ns:
            self._hop_s.observe((begun.begun_ns - plan.sent_ns) * 1e-9)

    def _failed(self, step: int, num_rows: int, error: Exception) -> None:
        """Empty the tables and tell the core why; raise what the step raised if no step can succeed any more."""
        self._num_failed_alone += num_rows == 1
        if self._worker.is_broken(error) or self._num_failed_alone >= MAX_FAILURES_ALONE:
            raise error
        self._process.log.error("step %d of %d requests failed", step, num_rows, exc_info=error)
        self._process.pending -= 1
        self._failures.inc()
        self._ended_ns = time.monotonic_ns()
        self._empty_tables()
        self._introduce(in_words(error))

    def _empty_tables(self) -> None:
        """Forget every request; plans that build on what was forgotten are dropped, begun or not."""
        self._process.pending -= self._in_flight.forget()
        self._process.pending += 1  # heartbeats tell of a reset that does not end: it waits for others
        self._worker.reset()
        self._process.pending -= 1
        self._num_emptied += 1
        if self._kv_talk is not None:
            self._kv_talk.reset()

    def _follow_core(self) -> bool:
        """Introduce ourselves to a core we have not met. Return whether there is a new one."""
        epoch = self._process.peers.epoch(Role.CORE, self._process.me.index)
        if epoch is None or epoch == self._core_epoch:
            return False
        if self._core_epoch is not None:
            self._empty_tables()
        self._core_epoch = epoch
        self._introduce()
        return True

    def _introduce(self, failure: str = "") -> None:
        """Tell the core what we have: empty tables."""
        config = self._process.config
        capacity = Capacity(
            executor_epoch=self._process.me.epoch,
            num_blocks=self._worker.num_blocks,
            block_size=config.model.kv.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            tables=self._num_emptied,
            failure=failure,
            num_host_blocks=self._worker.num_host_blocks,
            swap_bytes_per_s=self._worker.swap_bytes_per_s,
        )
        if self._kv_talk is not None:
            self._kv_talk.introduce(capacity)
        if self._pins.pins:
            self._process.peers.send(Role.CORE, self._process.me.index, self._pins)
        self._process.peers.send(Role.CORE, self._process.me.index, capacity)


def in_words(error: Exception) -> str:
    """Return an exception as one short line, fit for a client."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= MAX_FAILURE_CHARS else line[: MAX_FAILURE_CHARS - 1] + "…"


def serve(process: Process[Message]) -> None:
    """Boot, then execute plans until told to stop."""
    process.beat_from_a_thread()
    followers = None
    try:
        if process.config.executor.num_ranks > 1:
            _set_environment()  # they inherit it
            followers = FollowerProcesses(process.me, process.config)  # first: they load while this one does
        config = own_places(process.me.index, take_share(process.me.index, process.config))
        worker = make_worker(config, process.span, followers)
        executor = Executor(process, worker)
        process.account = executor.account
        process.ready(**worker.facts)
        with contextlib.closing(executor):
            while True:
                executor.turn()
    finally:
        if followers is not None:
            followers.close()
        process.close()


def run(me: WorkerId, config: EngineConfig) -> None:
    """Be the executor process."""
    serve(Process(me, config, Message))


if __name__ == "__main__":
    child_main(Role.EXECUTOR, run, begin=begin_imports)
