"""The executor's loop: plans in, results out, one after the other.

Owns the choice of worker and the handshake with the core (`Capacity`). Knows nothing of tensors.
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
            self._step(plan)

    def _step(self, plan: StepPlan) -> None:
        process = self._process
        free_ns, begun_ns = self._ended_ns, time.monotonic_ns()
        self._span("wait", plan.step, None, begun_ns)
        result = self._worker.execute(plan)
        self._ended_ns = ended_ns = time.monotonic_ns()
        result.wait_ns = begun_ns - free_ns
        result.compute_ns = ended_ns - begun_ns
        result.sent_ns = ended_ns
        process.peers.send(Role.CORE, CORE, result)
        self._span("send", plan.step, ended_ns)
        process.progress += 1
        process.pending -= 1
        self._steps.inc()
        self._wait_s.observe(result.wait_ns * 1e-9)
        self._compute_s.observe(result.compute_ns * 1e-9)
        if plan.sent_ns >= free_ns:
            self._hop_s.observe((begun_ns - plan.sent_ns) * 1e-9)

    def _follow_core(self) -> bool:
        """Introduce ourselves to a core we have not met. Return whether there is a new one."""
        epoch = self._process.peers.epoch(Role.CORE, CORE)
        if epoch is None or epoch == self._core_epoch:
            return False
        if self._core_epoch is not None:
            self._worker.reset()
        self._core_epoch = epoch
        config = self._process.config
        capacity = Capacity(
            executor_epoch=self._process.me.epoch,
            num_blocks=self._worker.num_blocks,
            block_size=config.model.kv.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
        )
        self._process.peers.send(Role.CORE, CORE, capacity)
        return True


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
