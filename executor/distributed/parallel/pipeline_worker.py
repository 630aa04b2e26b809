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
from functools import partial
from itertools import chain

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.huge_pages import gather_some
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.library import Note, OrderKind
from quintet.executor.distributed.parallel.pipeline import InFlightStep, Pipeline
from quintet.executor.distributed.parallel.ranks import Links
from quintet.executor.distributed.parallel.whole_blocks import BlocksOfAllRanks, Moves, own_moves
from quintet.executor.interface import Finished, Pending
from quintet.executor.kv_transfer.connector import KvConnector
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.ops import sampling_ops_of
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import DRAFTERS
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.verify import DraftedStep, Speculation
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.executor.worker import STEPS_PER_IDLE_TASK, MakeDrafter
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


class PipelineWorker:
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
        self.num_blocks = context.num_blocks()
        self.facts = context.facts(self.num_blocks)
        self._span = context.span
        self._pages = [each for each in context.pages if each.is_fragmented]
        """Memory with small pages left."""
        self._pipeline, self._ranks, config = pipeline, context.ranks, context.config
        self.experts = pipeline.expert_counts
        self._num_started = 0
        self._pending: deque[PipelinedStep] = deque()
        max_num_seqs, model = config.scheduler.max_num_seqs, config.model
        self.tables = SlotTables(
            max_num_seqs, model.max_model_len, model.kv, torch.device("cpu"), adapters=model.adapters
        )
        limits = config.scheduler
        max_drafts = 0 if limits.speculative is None else limits.speculative.num_speculative_tokens
        grammars = Grammars(max_num_seqs, model, max_drafts=max_drafts)
        ops = sampling_ops_of("cpu")
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self.tables, ops, grammars=grammars)
        assert context.kv is not None, "the back end has reserved KV memory"
        layers = context.kv.blocks
        self.num_host_blocks = model.kv.num_offloaded_blocks(config.cache.swap_bytes)
        host_blocks = HostBlocks(layers, self.num_host_blocks, pipeline.share.stripe)
        self._moves = moves = Moves(own_moves(context.kv, host_blocks), context.ranks, links.following)
        gather = context.memory.gather
        blocks = partial(BlocksOfAllRanks, config, gather, layers, pipeline.share, moves)
        swap_in = partial(moves.move, OrderKind.SWAP_IN)
        self.kv = KvConnector(blocks, config, ProgramRunner.__name__, self.num_host_blocks, swap_in)
        self.swap_bytes_per_s = host_blocks.measure()
        if self.num_host_blocks:
            self.facts["swap"] = f"{self.num_host_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._speculation = None
        if limits.speculative is not None:
            if make_drafter is not None:
                drafter = make_drafter(self.tables, self._sampler)
            else:
                drafter = DRAFTERS[limits.speculative.method](limits.speculative, self.tables)
            self._speculation = Speculation(
                drafter, self.tables, grammars, pipeline.max_outputs, limits.max_num_batched_tokens
            )

    @property
    def work_done(self) -> int:
        """Approximate progress counter of all stages."""
        return self._pipeline.work_done

    @property
    def seconds(self) -> float:
        """Time spent in the first stage's program so far."""
        return self._pipeline.seconds

    @property
    def output_cache(self) -> OutputCache | None:
        """Cached outputs of suffix decoding; None if it is not used."""
        return None if self._speculation is None else self._speculation.output_cache

    @property
    def num_active_slots(self) -> int:
        """Slots in use."""
        return self.tables.num_active_slots

    @property
    def has_idle_tasks(self) -> bool:
        """True if weights of any process remain on small pages, or experts on overloaded ranks."""
        of_ranks = self._ranks is not None and self._ranks.noted(Note.IDLE_TASKS) > 0
        return bool(self._pages) or of_ranks or self._pipeline.has_idle_tasks

    def run_idle_task(self) -> None:
        """Move some weights to huge pages in every process, or copy an expert to another rank."""
        self._pipeline.run_idle_task()
        if self._ranks is not None:
            self._ranks.send_idle_task()
        gather_some(self._pages)
        self._pages = [each for each in self._pages if each.is_fragmented]

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
        self._num_started += 1
        if self._num_started % STEPS_PER_IDLE_TASK == 0 and self.has_idle_tasks:
            self.run_idle_task()
        while self.waits_for(plan):
            self._finish(self._pending[0])
        if self._speculation is not None:
            self._speculation.end_requests(plan)
        self.tables.apply(plan)
        if plan.checksum:
            check_tables(plan, self.tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        if plan.swaps_out:
            self._moves.move(OrderKind.SWAP_OUT, plan.swaps_out)
        if plan.swaps_in:
            self.kv.copy_in(plan.swaps_in)
        if plan.copies:
            self._moves.move(OrderKind.COPY_BLOCKS, plan.copies)
        if self._speculation is not None:
            self._speculation.note(plan)
        self._span("tables", plan.step)
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
