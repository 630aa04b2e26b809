"""Run an executor's worker in this process with the server's number of steps in flight, alone or with a real core.

Measures the wall time between results, and the device's busy and idle time of each step, by its own events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quintet.core.counters import Counters
from quintet.core.engine import Engine
from quintet.core.token_messages import StepMessages
from quintet.executor.interface import Pending, StepWorker
from quintet.wire.codec import pack_i32, unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, PromptLogprobs, StepPlan, TokenLogprobs

MAX_IN_FLIGHT = 2
"""The server's default of `SchedulerConfig.max_steps_in_flight`."""


@dataclass(slots=True)
class Timing:
    """Times of the steps of a run, in order."""

    begun_s: float
    ends_s: list[float] = field(default_factory=list)
    """Time of each result, by `time.perf_counter`."""
    host_s: list[float] = field(default_factory=list)
    """Host time of each `StepWorker.begin`, which overlaps with the previous step."""
    device_ms: list[float] = field(default_factory=list)
    """Device time of each step that the device measured."""
    gap_ms: list[float] = field(default_factory=list)
    """Idle time of the device before each of these steps."""

    def step_s(self, skipped: int) -> float:
        """Return the mean time between results, without the first ``skipped`` steps."""
        ends = self.ends_s[skipped:]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def gap_share(self, skipped: int) -> float | None:
        """Return the device's share of idle time, without the first ``skipped`` steps; None if it was not measured."""
        busy, idle = sum(self.device_ms[skipped:]), sum(self.gap_ms[skipped:])
        return idle / (busy + idle) if busy else None


def drive(worker: StepWorker, plans: Iterable[StepPlan], max_in_flight: int = MAX_IN_FLIGHT) -> Timing:
    """Run the plans with at most ``max_in_flight`` unfinished steps."""
    timing = Timing(time.perf_counter())
    pending: deque[Pending] = deque()

    def finish() -> None:
        step = pending.popleft()
        step.wait()
        step.result()
        timing.ends_s.append(time.perf_counter())
        if step.device_ms is not None:
            timing.device_ms.append(step.device_ms)
            timing.gap_ms.append(step.gap_ms or 0.0)

    for plan in plans:
        begin_s = time.perf_counter()
        pending.append(worker.begin(plan))
        timing.host_s.append(time.perf_counter() - begin_s)
        if len(pending) == max_in_flight:
            finish()
    while pending:
        finish()
    return timing


def run_idle_tasks(worker: StepWorker) -> None:
    """Run the worker's idle tasks, such as capturing graphs."""
    while worker.has_idle_tasks:
        worker.run_idle_task()


class InProcessEngine:
    """A real core and a worker in one process: the engine without HTTP, tokenization and sockets."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.worker = worker
        worker.reset()
        self.engine = Engine(config.model, config.cache, config.scheduler)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        """Log-probabilities of each output token, by request."""
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
        self.num_steps = 0
        limits = (config.scheduler.max_num_seqs, config.model.max_model_len)
        self._pending: deque[Pending] = deque()
        capacity = Capacity(1, worker.num_blocks, config.model.kv.block_size, *limits)
        capacity.num_host_blocks = (
            worker.num_host_blocks
        )  # without a measured copy rate the core always swaps
        self._apply(self.engine.capacity(capacity, 0))

    @property
    def counters(self) -> Counters:
        """Counters of the core."""
        assert self.engine.state is not None, "the core has no capacity"
        return self.engine.state.counters

    def admit(self, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        """Queue a request."""
        admit = Admit(request_id, pack_i32(prompt), RequestSpec(params, 0, detokenizer=0), 0)
        self._apply(self.engine.admit(admit, 0))

    def run(self) -> None:
        """Run until all requests have ended, with the configured number of steps in flight."""
        while self.engine.num_live or self._pending:
            self.advance()

    def advance(self) -> None:
        """Begin all steps that the core plans, and wait for one result."""
        while (plan := self.engine.plan(0)) is not None:
            self._pending.append(self.worker.begin(plan))
        assert self._pending, "live requests, but no planned step"
        step = self._pending.popleft()
        step.wait()
        self.num_steps += 1
        self._apply(self.engine.commit(step.result(), 0))

    def _apply(self, effects: StepMessages) -> None:
        assert not effects.failed, effects.failed
        for _, tokens in effects.tokens:
            requests = unpack_i64(tokens.request_ids)
            offset = 0
            for request_id, count in zip(requests, tokens.num_tokens, strict=True):
                ids = unpack_i32(tokens.token_ids[4 * offset : 4 * (offset + count)])
                self.outputs.setdefault(request_id, []).extend(ids)
                offset += count
            for logprobs in tokens.logprobs:
                self.logprobs.setdefault(requests[logprobs.row], []).append(logprobs)
            for part in tokens.prompt_logprobs:
                self.prompt_logprobs.setdefault(requests[part.row], []).append(part)
