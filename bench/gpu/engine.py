"""The executor's worker in this process, with as many steps in flight as the server would have; and the core beside it.

Measures wall time from result to result, and what the device says of itself: its time and its idle time of each step.
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
"""As the server's default (`SchedulerConfig.max_steps_in_flight`)."""


@dataclass(slots=True)
class Timing:
    """Results and times of the steps of one run, in order."""

    begun_s: float
    ends_s: list[float] = field(default_factory=list)
    """Arrival of each result, by `time.perf_counter`."""
    host_s: list[float] = field(default_factory=list)
    """Host time to begin each step, hidden by the step before it."""
    device_ms: list[float] = field(default_factory=list)
    """Of the steps that the device timed."""
    gap_ms: list[float] = field(default_factory=list)
    """Idle time of the device before those steps."""

    def step_s(self, skipped: int) -> float:
        """Return the mean time of a step, from result to result, the first ``skipped`` left out."""
        ends = self.ends_s[skipped:]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def gap_share(self, skipped: int) -> float | None:
        """Return the device's idle time as a share of all its time, the first ``skipped`` steps left out; None if unknown."""
        busy, idle = sum(self.device_ms[skipped:]), sum(self.gap_ms[skipped:])
        return idle / (busy + idle) if busy else None


def drive(worker: StepWorker, plans: Iterable[StepPlan], max_in_flight: int = MAX_IN_FLIGHT) -> Timing:
    """Run the plans, each begun when fewer than ``max_in_flight`` are unfinished."""
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
        begun = time.perf_counter()
        pending.append(worker.begin(plan))
        timing.host_s.append(time.perf_counter() - begun)
        if len(pending) == max_in_flight:
            finish()
    while pending:
        finish()
    return timing


def finish_chores(worker: StepWorker) -> None:
    """Run the worker's idle tasks, such as capturing graphs."""
    while worker.has_idle_tasks:
        worker.run_idle_task()


class EngineAlone:
    """The real core over a worker, in one process: what the engine does without HTTP, text, and sockets."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.worker = worker
        worker.reset()
        self.engine = Engine(config.model, config.cache, config.scheduler)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        """Log probabilities of each output token, of the requests that ask for them."""
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
        self.num_steps = 0
        limits = (config.scheduler.max_num_seqs, config.model.max_model_len)
        self._pending: deque[Pending] = deque()
        capacity = Capacity(1, worker.num_blocks, config.model.kv.block_size, *limits)
        capacity.num_host_blocks = worker.num_host_blocks  # without a copy rate it always copies
        self._apply(self.engine.capacity(capacity, 0))

    @property
    def counters(self) -> Counters:
        """Counters of the core."""
        assert self.engine.state is not None, "the core has its capacity"
        return self.engine.state.counters

    def admit(self, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        """Queue a request."""
        admit = Admit(request_id, pack_i32(prompt), RequestSpec(params, 0, detokenizer=0), 0)
        self._apply(self.engine.admit(admit, 0))

    def run(self) -> None:
        """Run until no request is left, planning ahead as far as the depth allows."""
        while self.engine.num_live or self._pending:
            self.advance()

    def advance(self) -> None:
        """Begin what can be begun, and wait for one result."""
        while (plan := self.engine.plan(0)) is not None:
            self._pending.append(self.worker.begin(plan))
        assert self._pending, "requests are left and nothing is planned"
        step = self._pending.popleft()
        step.wait()
        self.num_steps += 1
        self._apply(self.engine.commit(step.result(), 0))

    def _apply(self, effects: StepMessages) -> None:
        assert not effects.failed, effects.failed
        for _, tokens in effects.tokens:
            requests = unpack_i64(tokens.request_ids)
            at = 0
            for request_id, count in zip(requests, tokens.num_tokens, strict=True):
                ids = unpack_i32(tokens.token_ids[4 * at : 4 * (at + count)])
                self.outputs.setdefault(request_id, []).extend(ids)
                at += count
            for logprobs in tokens.logprobs:
                self.logprobs.setdefault(requests[logprobs.row], []).append(logprobs)
            for part in tokens.prompt_logprobs:
                self.prompt_logprobs.setdefault(requests[part.row], []).append(part)
