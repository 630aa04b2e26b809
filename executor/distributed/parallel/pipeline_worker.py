"""Execute plans over pipeline stages: the `quintet.executor.interface.StepWorker` of the first stage.

    begin      the first stage's layers of step N + 1, while later stages compute step N
    result     draw step N's tokens from its logits

A step's tokens are in the token table only after its end. So `begin` first finishes every step with tokens that the
new rows read, and every step of a slot with a new request. `waits_for` reports this in advance, so that the loop sends
those results first.

Drafts are proposed in `begin`, where the tokens of the rows are known, and verified after the draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.pipeline import InFlightStep, Pipeline
from quintet.executor.distributed.parallel.ranks import Links
from quintet.executor.interface import Finished, Pending
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.masks import Masks
from quintet.executor.slots import Rows
from quintet.executor.speculation.drafters import MakeDrafter
from quintet.executor.speculation.verify import DraftedStep
from quintet.executor.table_audit import TablesDiffer
from quintet.executor.worker import HostWorker
from quintet.wire.step import StepPlan, StepResult


@dataclass(slots=True, eq=False)
class PipelinedStep:
    """A step with outstanding logits. Implements `quintet.executor.interface.Pending`."""

    plan: StepPlan
    rows: Rows
    flight: InFlightStep
    masks: StepMasks | None
    drafted: DraftedStep | None
    """Drafts of the rows; ``rows`` include them."""
    _wait: Callable[[InFlightStep], None]
    _finish: Callable[[PipelinedStep], None]
    outcome: StepResult | Exception | None = None
    """Result or error, after the draw."""

    device_ms = None
    gap_ms = None

    def wait(self) -> None:
        self._wait(self.flight)

    def result(self) -> StepResult:
        self._finish(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None, self.plan.step
        return self.outcome


@dataclass(frozen=True, slots=True)
class StepLogits:
    """More logits of the last step. Implements `quintet.executor.runner.LogitsSource`."""

    pipeline: Pipeline
    flight: InFlightStep

    @property
    def max_outputs(self) -> int:
        return self.pipeline.max_outputs

    def logits(self, tokens: Int) -> torch.Tensor:
        return self.pipeline.more_logits(self.flight, tokens)


class PipelineWorker(HostWorker):
    """The first stage, with the tables and the sampler for all stages."""

    num_split = 0

    def __init__(
        self,
        context: WorkerContext,
        pipeline: Pipeline,
        links: Links,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        """Build the worker of the first stage. make_drafter: of the draft model, if there is one."""
        super().__init__(context, pipeline, ProgramRunner.__name__, make_drafter, links.following)
        self._pipeline = pipeline
        self._pending: deque[PipelinedStep] = deque()

    @property
    def work_done(self) -> int:
        """Approximate progress counter of all stages."""
        return self._pipeline.work_done

    @property
    def seconds(self) -> float:
        """Time spent in the first stage's program so far."""
        return self._pipeline.seconds

    def reset(self) -> None:
        """Reset every table; wait for steps in flight and discard their logits."""
        self._pending.clear()
        self._pipeline.drain()
        self.tables.reset()

    def is_broken(self, error: Exception) -> bool:
        """Return whether the tables differ from the core's."""
        return isinstance(error, TablesDiffer)

    def waits_for(self, plan: StepPlan) -> bool:
        """Return whether the oldest undrawn step must be drawn before this plan starts."""
        if not self._pending:
            return False
        if len(self._pending) >= self._pipeline.depth:
            return True
        replaced = {*np.frombuffer(plan.freed, np.int32).tolist(), *(row.slot for row in plan.new_rows)}
        touched = replaced.union(np.frombuffer(plan.slots, np.int32).tolist())
        drawing = (step.rows.slots[step.rows.sampling].tolist() for step in self._pending)
        # The sampler and the drafter read these steps with the requests and blocks that they were computed with.
        computed = (step.rows.slots.tolist() for step in self._pending)
        if not touched.isdisjoint(chain(*drawing)) or not replaced.isdisjoint(chain(*computed)):
            return True
        return bool(plan.copies) and self._speculation is not None and self._speculation.drafter.reads_steps

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Pending:
        self._run_due_idle_task(plan)
        while self.waits_for(plan):
            self._finish(self._pending[0])
        self._apply(plan)
        if not plan.slots:
            return Finished(StepResult(plan.step, 0, b""))
        drafted = None
        if self._speculation is not None and plan.drafts:
            drafted = self._speculation.begin(plan)
        rows = Rows(plan if drafted is None else drafted.plan)
        reports_prompt = self._sampler.reports_prompt(rows)
        while reports_prompt and self._pending:
            self._finish(self._pending[0])
        masks = self._sampler.begin_masks(rows)
        self._span("tables", plan.step)
        flight = self._pipeline.begin(rows, self.tables, self._sampler.settings)
        self._span("layers")
        step = PipelinedStep(plan, rows, flight, masks, drafted, self._pipeline.wait, self._finish)
        self._pending.append(step)
        if reports_prompt:
            self._finish(step)
        return step

    @torch.inference_mode()
    def _finish(self, last: PipelinedStep) -> None:
        """Draw all steps up to this one. If a draw raises, the step keeps the error for its `result`."""
        while last.outcome is None:
            step = self._pending.popleft()
            logits = self._pipeline.take(step.flight)
            self._span("bubble", step.plan.step)
            try:
                step.outcome = self._draw(step, logits)
            except Exception as error:  # noqa: BLE001 - raised later, by the `result` of the step itself
                step.outcome = error
            finally:
                self._pipeline.release_logits()

    def _draw(self, step: PipelinedStep, logits: torch.Tensor) -> StepResult:
        result, rows, sampler = StepResult(step.plan.step, 0, b""), step.rows, self._sampler
        masks = step.masks
        allowed = None if masks is None else masks.wait()
        if sampler.reports_prompt(rows):
            logits = self._pipeline.copy_taken(step.flight, logits)
            result.prompt_logprobs = sampler.prompt_logprobs(rows, StepLogits(self._pipeline, step.flight))
            self._draw_more(result, rows, logits, allowed)
        elif sampler.needs_logits(rows):
            self._draw_more(result, rows, logits[: len(rows.sampling)], allowed)
        else:
            result.token_ids = self._pipeline.draw(step.flight, logits, allowed)
        if masks is not None:
            masks.note(np.frombuffer(result.token_ids, np.int32).tolist())
            result.failed = masks.failed(rows.sampling)
        if step.drafted is not None:
            assert self._speculation is not None
            self._speculation.end(step.drafted, result)
        elif self._speculation is not None:
            self._speculation.end_without_drafts(step.plan)
        self._span("sampling")
        return result

    def _draw_more(self, result: StepResult, rows: Rows, logits: torch.Tensor, masks: Masks | None) -> None:
        if len(rows.sampling):
            drawn, result.logprobs = self._sampler.draw(rows, logits, masks)
            result.token_ids = drawn.to(torch.int32).numpy().tobytes()
