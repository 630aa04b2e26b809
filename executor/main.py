"""The executor's loop: plans in, results out, one after the other.

Owns the choice of worker and the handshake with the core (`Capacity`). Knows nothing of tensors, nor whose fault it is
when a step raises: it empties the tables and tells the core, which finds out.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable

from quintet.executor.interface import StepWorker
from quintet.executor.weights.read_ahead import read_ahead
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Topology
from quintet.wire.runtime import Process, child_main
from quintet.wire.step import Capacity, StepPlan
from quintet.wire.trace import Span

WORKERS = {
    "torch": "quintet.executor.worker:make_worker",
    "mock": "quintet.executor.mock:make_worker",
}
"""``ExecutorConfig.kind`` to the function that makes the worker. Imported when chosen: the mock needs no torch."""

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Read by libraries that a worker loads: OpenMP threads sleep between parallel regions instead of spinning on cores the
other processes need; torch asks for huge pages for large tensors. What the user has set stays."""

CORE = 0

MAX_FAILURES_ALONE = 8
"""Steps of one request each that raise, without one step that succeeds between them: after the last, it is not the
requests. The core never runs one of them again, so they are different ones."""

MAX_FAILURE_CHARS = 200


def make_worker(config: EngineConfig, span: Span) -> StepWorker:
    """Import and build the worker that the configuration names."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.executor.kind == "torch" and config.executor.load_format == "auto":
        read_ahead(config)
    module, _, function = WORKERS[config.executor.kind].partition(":")
    gc.disable()  # importing torch makes a million objects that stay: looking through them takes a seventh of its second
    make: Callable[[EngineConfig, Span], StepWorker] = getattr(importlib.import_module(module), function)
    gc.enable()
    return make(config, span)


class Executor:
    """The seat and the worker, and which core they serve."""

    def __init__(self, process: Process[StepPlan], worker: StepWorker) -> None:
        self._process = process
        self._worker = worker
        self._span = process.span
        self._core_epoch: int | None = None
        self._num_emptied = 0
        self._num_failed_alone = 0
        self._ended_ns = time.monotonic_ns()
        self._steps = process.metrics.counter("executor_steps", "Steps executed.")
        self._wait_s = process.metrics.histogram(
            "executor_wait_seconds", "Time between the end of a step and the start of the next."
        )
        self._compute_s = process.metrics.histogram("executor_compute_seconds", "Time in model and sampler.")
        self._hop_s = process.metrics.histogram(
            "executor_plan_hop_seconds",
            "Time from a plan's sending until the executor began it or was free to.",
        )
        self._failures = process.metrics.counter("executor_step_failures", "Steps that raised.")

    def account(self) -> tuple[int, int]:
        """Return progress and pending work; called from the thread that sends heartbeats, in the middle of a step."""
        return self._process.progress + self._worker.work_done, self._process.pending

    def handle(self, messages: list[StepPlan | Topology]) -> None:
        """Execute the plans among ``messages``, in order.

        When the core's epoch changed, every plan of the batch is from the core that is gone: the new one sends its
        first plan only after it has our `Capacity`.
        """
        if self._follow_core():
            return
        plans = [message for message in messages if isinstance(message, StepPlan)]
        self._process.pending = len(plans)
        for plan in plans:
            if plan.tables == self._num_emptied:
                self._step(plan)
            self._process.pending -= 1

    def _step(self, plan: StepPlan) -> None:
        process = self._process
        free_ns, begun_ns = self._ended_ns, time.monotonic_ns()
        self._span("wait", plan.step, None, begun_ns)
        try:
            result = self._worker.execute(plan)
        except Exception as error:  # noqa: BLE001 - whatever a request made it raise, the others can go on
            self._failed(plan, error)
            return
        self._num_failed_alone = 0
        self._ended_ns = ended_ns = time.monotonic_ns()
        result.num_tenants = self._worker.num_tenants
        result.wait_ns = begun_ns - free_ns
        result.compute_ns = ended_ns - begun_ns
        result.sent_ns = ended_ns
        process.peers.send(Role.CORE, CORE, result)
        self._span("send", plan.step, ended_ns)
        process.progress += 1
        self._steps.inc()
        self._wait_s.observe(result.wait_ns * 1e-9)
        self._compute_s.observe(result.compute_ns * 1e-9)
        if plan.sent_ns >= free_ns:
            self._hop_s.observe((begun_ns - plan.sent_ns) * 1e-9)

    def _failed(self, plan: StepPlan, error: Exception) -> None:
        """Empty the tables and tell the core why; raise what the step raised if no step can succeed any more."""
        num_rows = len(plan.slots) // 4
        self._num_failed_alone += num_rows == 1
        if self._worker.is_broken(error) or self._num_failed_alone >= MAX_FAILURES_ALONE:
            raise error
        self._process.log.exception("step %d of %d requests raised", plan.step, num_rows)
        self._failures.inc()
        self._ended_ns = time.monotonic_ns()
        self._empty_tables()
        self._introduce(in_words(error))

    def _empty_tables(self) -> None:
        """Forget every request; plans that build on what was forgotten are dropped."""
        self._worker.reset()
        self._num_emptied += 1

    def _follow_core(self) -> bool:
        """Introduce ourselves to a core we have not met. Return whether there is a new one."""
        epoch = self._process.peers.epoch(Role.CORE, CORE)
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
        )
        self._process.peers.send(Role.CORE, CORE, capacity)


def in_words(error: Exception) -> str:
    """Return an exception as one short line, fit for a client."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= MAX_FAILURE_CHARS else line[: MAX_FAILURE_CHARS - 1] + "…"


def serve(process: Process[StepPlan]) -> None:
    """Boot, then execute plans until told to stop."""
    process.beat_from_a_thread()
    try:
        worker = make_worker(process.config, process.span)
        executor = Executor(process, worker)
        process.account = executor.account
        process.ready(**worker.facts)
        while True:
            executor.handle(process.receive())
    finally:
        process.close()


def run(me: WorkerId, config: EngineConfig) -> None:
    """Be the executor process."""
    serve(Process(me, config, StepPlan))


if __name__ == "__main__":
    child_main(Role.EXECUTOR, run)
