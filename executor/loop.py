"""The executor's loop: receive plans, send results in the same order.

The loop starts a plan on arrival, while earlier steps still run. The core limits the number of steps in flight
(`SchedulerConfig.max_steps_in_flight`). This module owns the handshake with the core (`Capacity`). It handles no tensors.
After a step raises, it resets the tables and reports the failure; the core isolates the request.
"""

from __future__ import annotations

import time

from quintet.executor.expert_metrics import ExpertMetrics
from quintet.executor.in_flight import InFlight, StartedStep
from quintet.executor.interface import Finished, StepWorker
from quintet.executor.speculation.output_cache import OutputCacheMetrics
from quintet.process.runtime import Process
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role
from quintet.wire.kv_tiers import KvPins, KvTierRequests, TierResultsReady
from quintet.wire.limits import FrameTooLarge
from quintet.wire.step import Capacity, StepPlan, StepResult, StepsEnded
from quintet.wire.supervision import Topology

MAX_FAILURES_ALONE = 8
"""Consecutive failures of single-request steps before the executor stops.

The core never repeats such a request, so these failures come from different requests and the worker is the cause.
"""

MAX_FAILURE_CHARS = 200

Message = StepPlan | KvTierRequests | KvPins


class Executor:
    """The loop between one core and one worker, with the steps in flight."""

    def __init__(self, process: Process[Message], worker: StepWorker) -> None:
        self._process = process
        self._worker = worker
        self._span = process.span
        self._in_flight = InFlight(process.inbox)
        self._kv = worker.kv
        if self._kv is not None:
            self._kv.begin(process)
        self._core_epoch: int | None = None
        self._last_step: int | None = None
        """The newest plan received from this core, dropped plans included."""
        self._pins = KvPins([])
        """The current pins, sent to each new core."""
        self._num_emptied = 0
        self._num_failed_alone = 0
        self._ended_ns = time.monotonic_ns()
        self._steps = process.metrics.counter("executor_steps", "Steps executed.")
        self._wait_s = process.metrics.histogram(
            "executor_wait_seconds", "Time between the end of a step and the start of the next."
        )
        self._compute_s = process.metrics.histogram("executor_compute_seconds", "Time in model and sampler.")
        self._gap_s = process.metrics.histogram(
            "executor_device_gap_seconds", "Idle time of the device before a step."
        )
        self._hop_s = process.metrics.histogram(
            "executor_plan_hop_seconds",
            "Time from sending a plan until the executor started it or was free to start it.",
        )
        self._failures = process.metrics.counter(
            "executor_step_failures", "Steps that failed with an exception."
        )
        self._split = process.metrics.counter(
            "executor_steps_split", "Steps split after running out of memory."
        )

        counts = worker.experts
        self._experts = None if counts is None else ExpertMetrics(process.metrics, counts)
        cache = worker.output_cache
        self._output_cache = None if cache is None else OutputCacheMetrics(process.metrics, cache)

    def account(self) -> tuple[int, int]:
        """Return progress and pending work. The heartbeat thread calls it during a step."""
        return self._process.progress + self._worker.work_done, self._process.pending

    def run_once(self) -> None:
        """Wait for messages and handle them; run an idle task instead while no step is in flight."""
        if self._in_flight.steps or not self._worker.has_idle_tasks:
            self.handle(self._process.receive())
            return
        messages = self._process.receive(0.0)
        if messages:
            self.handle(messages)
        else:
            self._run_idle_task()

    def _run_idle_task(self) -> None:
        """Run one idle task as pending work, so that heartbeats detect a hang: ranks wait for each other in it."""
        self._process.pending += 1
        self._worker.run_idle_task()
        self._process.progress += 1
        self._process.pending -= 1

    def handle(self, messages: list[Message | StepsEnded | TierResultsReady | Topology | Dropped]) -> None:
        """Send the results of the steps that ended, then start the plans among ``messages``, all in order.

        After a change of the core's epoch, every plan in ``messages`` is from the previous core. The new core sends
        its first plan only after it receives a `Capacity`.
        """
        is_new_core = self._follow_core()
        plans: list[StepPlan | KvTierRequests | Dropped] = []
        for message in messages:
            if isinstance(message, StepPlan) or (
                isinstance(message, Dropped) and self._is_next_plan(message)
            ):
                plans.append(message)
                self._last_step = message.step
            elif isinstance(message, KvTierRequests):
                plans.append(message)
            elif isinstance(message, KvPins):
                self._pins = message
            elif isinstance(message, TierResultsReady) and self._kv is not None:
                self._kv.send_results()
            elif isinstance(message, StepsEnded):
                for started in self._in_flight.ended(message.count):
                    self._end(started)
        if is_new_core:
            self._last_step = None
            return
        self._process.pending += sum(not isinstance(plan, KvTierRequests) for plan in plans)
        for plan in plans:
            if isinstance(plan, KvTierRequests):
                if self._kv is not None and plan.tables_epoch == self._num_emptied:
                    self._kv.order(plan)
            elif plan.tables_epoch != self._num_emptied:
                self._process.pending -= 1
            elif isinstance(plan, Dropped):
                self._fail_dropped(plan)
            else:
                self._begin(plan)

    def _is_next_plan(self, dropped: Dropped) -> bool:
        """Return whether the dropped frame is the next expected plan: the core waits for its result."""
        return dropped.step is not None and self._last_step in (None, dropped.step - 1)

    def _fail_dropped(self, dropped: Dropped) -> None:
        """Fail a plan that the inbox dropped, as if it had raised; the core isolates the request that caused it."""
        assert dropped.step is not None
        self._settle_in_flight()
        if dropped.tables_epoch == self._num_emptied:
            reason = "the executor rejected the step's plan: invalid lengths or numbers"
            self._failed(dropped.step, 0, ValueError(reason))
        else:
            self._process.pending -= 1

    def close(self) -> None:
        """Stop waiting for the device, the disk, and other servers."""
        self._in_flight.close()
        if self._kv is not None:
            self._kv.close()

    def _begin(self, plan: StepPlan) -> None:
        """Start a plan. A step that ends immediately is settled immediately, unless older steps are in flight."""
        self._settle_before(plan)
        if plan.tables_epoch != self._num_emptied:
            self._process.pending -= 1  # an older step failed
            return
        free_ns, started_ns = self._ended_ns, time.monotonic_ns()
        self._span("wait", plan.step, None, started_ns)
        try:
            pending = self._worker.begin(plan)
        except Exception as error:  # noqa: BLE001 - a request may cause any exception; other requests continue
            self._settle_in_flight()
            if plan.tables_epoch == self._num_emptied:
                self._failed(plan.step, len(plan.slots) // 4, error)
            else:
                self._process.pending -= 1
            return
        started = StartedStep(plan, pending, self._worker.num_active_slots, free_ns, started_ns)
        # Not "has it ended?": replay of a recorded executor must settle each step in the same iteration.
        if isinstance(pending, Finished) and not self._in_flight.steps:
            self._send_result(started, pending.outcome)
        else:
            self._in_flight.add(started)

    def _settle_before(self, plan: StepPlan) -> None:
        """Send the results of the steps that must end before this plan starts."""
        if self._worker.waits_for(plan):
            for before in self._in_flight.unsettled():
                self._end(before)
                if not self._worker.waits_for(plan):
                    break

    def _settle_in_flight(self) -> None:
        """Send the results of the steps before a failed one; its failure does not affect them."""
        for before in self._in_flight.unsettled():
            self._end(before)

    def _end(self, started: StartedStep) -> None:
        """Send the result of the oldest step in flight, or report its failure."""
        plan = started.plan
        try:
            started.pending.wait()
            result = started.pending.result()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(plan.step, len(plan.slots) // 4, error)
        else:
            self._send_result(started, result)

    def _send_result(self, started: StartedStep, result: StepResult) -> None:
        """Send the result of a step that ended, with its times."""
        process, plan, pending = self._process, started.plan, started.pending
        self._num_failed_alone = 0
        free_ns = max(started.started_ns, self._ended_ns)
        self._ended_ns = ended_ns = time.monotonic_ns()
        device_ms, gap_ms = pending.device_ms, pending.gap_ms
        result.num_active_slots = started.num_active_slots
        result.wait_ns = started.started_ns - started.free_ns if gap_ms is None else round(gap_ms * 1e6)
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
        if self._output_cache is not None:
            self._output_cache.note_step()
        self._wait_s.observe(result.wait_ns * 1e-9)
        self._compute_s.observe(result.compute_ns * 1e-9)
        if gap_ms is not None:
            self._gap_s.observe(gap_ms * 1e-3)
        if plan.sent_ns >= started.free_ns:
            self._hop_s.observe((started.started_ns - plan.sent_ns) * 1e-9)

    def _failed(self, step: int, num_rows: int, error: Exception) -> None:
        """Reset the tables and report the failure to the core; raise ``error`` if no further step can succeed."""
        self._num_failed_alone += num_rows == 1
        if self._worker.is_broken(error) or self._num_failed_alone >= MAX_FAILURES_ALONE:
            raise error
        self._process.log.error("step %d of %d requests failed", step, num_rows, exc_info=error)
        self._process.pending -= 1
        self._failures.inc()
        self._ended_ns = time.monotonic_ns()
        self._empty_tables()
        self._send_capacity(error_text(error))

    def _empty_tables(self) -> None:
        """Remove every request, and drop the plans that depend on them, started or not."""
        self._process.pending -= self._in_flight.forget()
        self._process.pending += 1  # heartbeats detect a reset that hangs: it waits for other ranks
        self._worker.reset()
        self._process.pending -= 1
        self._num_emptied += 1
        if self._kv is not None:
            self._kv.reset()

    def _follow_core(self) -> bool:
        """Send `Capacity` to a core with a new epoch. Return whether the core is new."""
        epoch = self._process.peers.epoch(Role.CORE, self._process.me.index)
        if epoch is None or epoch == self._core_epoch:
            return False
        if self._core_epoch is not None:
            self._empty_tables()
        self._core_epoch = epoch
        self._send_capacity()
        return True

    def _send_capacity(self, failure: str = "") -> None:
        """Send the core the pins and the capacity; the tables are empty."""
        config = self._process.config
        capacity = Capacity(
            executor_epoch=self._process.me.epoch,
            num_blocks=self._worker.num_blocks,
            block_size=config.model.kv.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            tables_epoch=self._num_emptied,
            failure=failure,
            num_host_blocks=self._worker.num_host_blocks,
            swap_bytes_per_s=self._worker.swap_bytes_per_s,
        )
        if self._kv is not None:
            self._kv.add_capacity(capacity)
        if self._pins.pins:
            self._process.peers.send(Role.CORE, self._process.me.index, self._pins)
        self._process.peers.send(Role.CORE, self._process.me.index, capacity)


def error_text(error: Exception) -> str:
    """Return an exception as one printable line of at most `MAX_FAILURE_CHARS`, for an API error."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= MAX_FAILURE_CHARS else line[: MAX_FAILURE_CHARS - 1] + "…"
