"""Execute plans with a real model: slot tables, forward pass, sampling. Contains no socket code.

Steps run on the device in plan order, so a plan may read everything that earlier plans wrote, including tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.huge_pages import gather_some
from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.library import Note, OrderKind
from quintet.executor.distributed.parallel.whole_blocks import BlocksOfAllRanks, Moves, own_moves
from quintet.executor.interface import Finished
from quintet.executor.kv_transfer.block_bytes import BlockBytes, WholeBlocks
from quintet.executor.kv_transfer.connector import KvConnector
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.executor.model_config.share import most_outputs
from quintet.executor.oom_split import OomSplit
from quintet.executor.pooling import Pooler
from quintet.executor.runner import Runner
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.ops import sampling_ops_of
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.draft_states import DraftStates
from quintet.executor.speculation.drafters import DRAFTERS, Drafter
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.verify import Speculation
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan, StepResult

MakeDrafter = Callable[[SlotTables, Sampler], Drafter]

STEPS_PER_IDLE_TASK = 4
"""Under load, one idle task runs every so many steps. Measured: a step is 10% shorter with the weights on huge pages."""


class Worker:
    """A loaded model with its KV memory, its slot tables and its sampler."""

    def __init__(
        self,
        context: WorkerContext,
        runner: Runner,
        program: ModelProgram | None = None,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        """Build the worker around a loaded model. program: the recorded program of the model, if there is one.

        make_drafter: of the draft model, if there is one.
        """
        self.num_blocks = num_blocks = context.num_blocks()
        self.facts = context.facts(num_blocks)
        self.runner = runner
        self._span = context.span
        self._pages = [each for each in context.pages if each.is_fragmented]
        """Memory with small pages left."""
        self._ranks = ranks = context.ranks
        self._program = program
        self.experts = None if program is None else program.expert_counts
        self._num_started = 0
        config, device = context.config, context.platform.device
        max_num_seqs, model = config.scheduler.max_num_seqs, config.model
        self.tables = SlotTables(max_num_seqs, model.max_model_len, model.kv, device, adapters=model.adapters)
        speculative = config.scheduler.speculative
        max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        grammars = Grammars(max_num_seqs, model, max_drafts=max_drafts)
        ops = sampling_ops_of(context.platform.name)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self.tables, ops, grammars=grammars)
        assert context.kv is not None, "the back end has reserved KV memory"
        self._kv, share, layers = context.kv, context.share, context.kv.blocks
        self.num_host_blocks = model.kv.num_offloaded_blocks(config.cache.swap_bytes)
        host_blocks = HostBlocks(layers, self.num_host_blocks, share.stripe)
        self._moves = moves = Moves(own_moves(context.kv, host_blocks), ranks)
        self.swap_bytes_per_s = host_blocks.measure()
        blocks: Callable[[], WholeBlocks] = partial(BlockBytes, layers)
        if ranks is not None:
            blocks = partial(BlocksOfAllRanks, config, context.memory.gather, layers, share, moves)
        swap_in = partial(moves.move, OrderKind.SWAP_IN)
        self.kv = KvConnector(blocks, config, type(runner).__name__, self.num_host_blocks, swap_in)
        if self.num_host_blocks:
            self.facts["swap"] = f"{self.num_host_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._pooler = Pooler()
        self._speculation = self._open_speculation(config, grammars, make_drafter)
        self._oom_split = OomSplit(
            torch.cuda.empty_cache if device.type == "cuda" else lambda: None,
            self.tables.continue_states if model.kv.has_states else None,
        )

    def _open_speculation(
        self, config: EngineConfig, grammars: Grammars, make_drafter: MakeDrafter | None
    ) -> Speculation | None:
        limits, speculative = config.scheduler, config.scheduler.speculative
        if speculative is None:
            return None
        if make_drafter is not None:
            drafter = make_drafter(self.tables, self._sampler)
        else:
            drafter = DRAFTERS[speculative.method](speculative, self.tables)
        states = None
        if config.model.kv.has_states:
            states = DraftStates(self.tables, self._kv, self.copy_blocks)
        return Speculation(
            drafter, self.tables, grammars, most_outputs(limits), limits.max_num_batched_tokens, states
        )

    @property
    def work_done(self) -> int:
        """The runner's progress counter."""
        return self.runner.work_done

    @property
    def output_cache(self) -> OutputCache | None:
        return None if self._speculation is None else self._speculation.drafter.output_cache

    @property
    def num_active_slots(self) -> int:
        return self.tables.num_active_slots

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
    def has_idle_tasks(self) -> bool:
        """True if weights of any rank remain on small pages, or experts on overloaded ranks."""
        if self._program is not None and self._program.has_idle_tasks:
            return True
        return bool(self._pages) or (self._ranks is not None and self._ranks.noted(Note.IDLE_TASKS) > 0)

    def run_idle_task(self) -> None:
        """Move some weights to huge pages on every rank, or copy an expert to another rank."""
        if self._program is not None:
            self._program.run_idle_task()
        if self._ranks is not None:
            self._ranks.send_idle_task()
        gather_some(self._pages)
        self._pages = [each for each in self._pages if each.is_fragmented]

    @property
    def num_split(self) -> int:
        """Steps split after running out of memory."""
        return self._oom_split.num_split

    def waits_for(self, plan: StepPlan) -> bool:
        """Return False: a step ends inside `begin`."""
        return False

    def begin(self, plan: StepPlan) -> Finished:
        """Execute the plan and wait for the device; the worker in `quintet.executor.backends.cuda` does not wait."""
        self._num_started += 1
        if self._num_started % STEPS_PER_IDLE_TASK == 0 and self.has_idle_tasks:
            self.run_idle_task()  # a busy server gains most
            self._span("idle_tasks", plan.step)
        return Finished(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's deltas, then its swaps and block copies; then compute its rows and draw tokens."""
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

    def copy_blocks(self, pairs: bytes) -> None:
        """Copy whole blocks on all ranks; see `StepPlan.copies`."""
        self._moves.move(OrderKind.COPY_BLOCKS, pairs)
