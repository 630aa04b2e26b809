"""Execute plans with a real model: slot tables, forward pass, sampling. Contains no socket code.

Steps run on the device in plan order, so a plan may read everything that earlier plans wrote, including tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.huge_pages import gather_some
from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.library import Note, OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.whole_blocks import open_block_moves
from quintet.executor.interface import Finished, Pending
from quintet.executor.oom_split import OomSplit
from quintet.executor.pooling import Pooler
from quintet.executor.runner import Runner
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.ops import sampling_ops_of
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import MakeDrafter
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.verify import open_speculation
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.wire.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quintet.executor.distributed.parallel.pipeline import Pipeline

STEPS_PER_IDLE_TASK = 4
"""Under load, one idle task runs every so many steps. Measured: a step is 10% shorter with the weights on huge pages."""


class HostWorker(ABC):
    """A worker with its slot tables, sampler and drafts in this process, also for models on several ranks or stages."""

    def __init__(
        self,
        context: WorkerContext,
        program: ModelProgram | Pipeline | None,
        runner_name: str,
        make_drafter: MakeDrafter | None,
        following: Ranks | None = None,
    ) -> None:
        """program: the recorded program of the model, if there is one. make_drafter: of the draft model, if there is one.

        following: the link to the next stage, if there are several.
        """
        self.num_blocks = num_blocks = context.num_blocks()
        self.facts = context.facts(num_blocks)
        self._span = context.span
        self._pages = [each for each in context.pages if each.is_fragmented]
        """Memory with small pages left."""
        self._ranks, self._program = context.ranks, program
        self.experts = None if program is None else program.expert_counts
        self._num_started = 0
        config, platform, model = context.config, context.platform, context.config.model
        limits, device = config.scheduler, platform.device
        max_num_seqs, speculative = limits.max_num_seqs, limits.speculative
        self.tables = SlotTables(max_num_seqs, model.max_model_len, model.kv, device, adapters=model.adapters)
        max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        grammars = Grammars(max_num_seqs, model, max_drafts=max_drafts)
        ops = sampling_ops_of(platform.name)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self.tables, ops, grammars=grammars)
        assert context.kv is not None, "the back end has reserved KV memory"
        self._moves, host_blocks, self.kv = open_block_moves(context, runner_name, following)
        self.num_host_blocks, self.swap_bytes_per_s = host_blocks.num_blocks, host_blocks.measure()
        if self.num_host_blocks:
            self.facts["swap"] = f"{self.num_host_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._speculation = open_speculation(
            config, self.tables, self._sampler, grammars, context.kv, self.copy_blocks, make_drafter
        )

    @property
    def output_cache(self) -> OutputCache | None:
        return None if self._speculation is None else self._speculation.drafter.output_cache

    @property
    def num_active_slots(self) -> int:
        return self.tables.num_active_slots

    @property
    def has_idle_tasks(self) -> bool:
        """True if weights of any process remain on small pages, or experts on overloaded ranks."""
        if self._program is not None and self._program.has_idle_tasks:
            return True
        return bool(self._pages) or (self._ranks is not None and self._ranks.noted(Note.IDLE_TASKS) > 0)

    def run_idle_task(self) -> None:
        """Move some weights to huge pages in every process, or copy an expert to another rank."""
        if self._program is not None:
            self._program.run_idle_task()
        if self._ranks is not None:
            self._ranks.send_idle_task()
        gather_some(self._pages)
        self._pages = [each for each in self._pages if each.is_fragmented]

    @abstractmethod
    def begin(self, plan: StepPlan) -> Pending:
        """See `StepWorker.begin`."""

    def _run_due_idle_task(self, plan: StepPlan) -> None:
        """Count a plan; run an idle task every `STEPS_PER_IDLE_TASK` plans. A busy server gains most."""
        self._num_started += 1
        if self._num_started % STEPS_PER_IDLE_TASK == 0 and self.has_idle_tasks:
            self.run_idle_task()
            self._span("idle_tasks", plan.step)

    def _apply(self, plan: StepPlan) -> None:
        """Apply the plan's deltas, then its swaps and block copies."""
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
            self.copy_blocks(plan.copies)
        if self._speculation is not None:
            self._speculation.note(plan)
        self._span("tables", plan.step)

    def copy_blocks(self, pairs: bytes) -> None:
        """Copy whole blocks on all ranks; see `StepPlan.copies`."""
        self._moves.move(OrderKind.COPY_BLOCKS, pairs)


class Worker(HostWorker):
    """A loaded model with its KV memory, which computes each step in `begin`."""

    def __init__(
        self,
        context: WorkerContext,
        runner: Runner,
        program: ModelProgram | None = None,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        """See `HostWorker`."""
        super().__init__(context, program, type(runner).__name__, make_drafter)
        self.runner = runner
        self._pooler = Pooler()
        self._oom_split = OomSplit(
            torch.cuda.empty_cache,  # does nothing without CUDA
            self.tables.continue_states if context.config.model.kv.has_states else None,
        )

    @property
    def work_done(self) -> int:
        """The runner's progress counter."""
        return self.runner.work_done

    def reset(self) -> None:
        """Free all slots."""
        self.tables.reset()

    def is_broken(self, error: Exception) -> bool:
        """Return whether the process can no longer use the device, or its tables differ from the core's.

        After the first error that a CUDA kernel reports, a process cannot use the device; running out of memory is
        the exception. Tables that differ are a bug of the engine, not of a request.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, torch.AcceleratorError | TablesDiffer)

    @property
    def num_split(self) -> int:
        """Steps split after running out of memory."""
        return self._oom_split.num_split

    def waits_for(self, plan: StepPlan) -> bool:
        """Return False: a step ends inside `begin`."""
        return False

    def begin(self, plan: StepPlan) -> Finished:
        """Execute the plan and wait for the device; the worker in `quintet.executor.backends.cuda` does not wait."""
        self._run_due_idle_task(plan)
        return Finished(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan; then compute its rows and draw tokens."""
        self._apply(plan)
        if not plan.slots:
            return StepResult(plan.step, 0, b"")
        if self._oom_split.max_tokens is not None:
            return self._oom_split.compute(plan, self._compute)
        try:
            return self._compute(plan)
        except torch.OutOfMemoryError as error:
            self._oom_split.note_shortage(plan, error)
        return self._oom_split.compute_in_parts(plan, self._compute)

    def _compute(self, plan: StepPlan) -> StepResult:
        """Compute a plan, or a part of one, with drafts where it allows them. The tables already hold its deltas."""
        if self._speculation is not None:
            return self._speculation.compute(plan, self._compute_rows)
        return self._compute_rows(plan)

    def _compute_rows(self, plan: StepPlan) -> StepResult:
        """Compute the rows of a plan and draw their tokens."""
        rows = Rows(plan)
        masks = self._sampler.begin_masks(rows)
        result: StepResult | None = None
        if not self._sampler.needs_logits(rows):
            tokens = self.runner.forward_and_draw(rows, self.tables, self._sampler.settings, masks)
            if tokens is not None:
                result = StepResult(plan.step, 0, tokens)
        if result is None:
            result = self._forward_then_sample(plan, rows, masks)
        if plan.pooled_rows:
            result.vectors = self._pooler.pool(rows, self.runner)
        if masks is not None:
            masks.note(np.frombuffer(result.token_ids, np.int32).tolist())
            result.failed = masks.failed(rows.sampling)
        return result

    @torch.inference_mode()
    def _forward_then_sample(self, plan: StepPlan, rows: Rows, masks: StepMasks | None) -> StepResult:
        """Compute a step with separate sampling: it returns log-probabilities, or the runner has no fused sampling."""
        result = StepResult(plan.step, 0, b"")
        self.runner.forward(rows, self.tables)
        self._span("layers")
        result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self.runner)
        if len(rows.sampling):
            logits = self.runner.logits(rows.draw_tokens)
            self._span("logits")
            drawn, result.logprobs = self._sampler.draw(rows, logits, None if masks is None else masks.wait())
            result.token_ids = drawn.to(torch.int32).cpu().numpy().tobytes()
            self._span("sampling")
        return result
