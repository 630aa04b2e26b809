"""Executes plans asynchronously on a device; implements `quintet.executor.interface.StepWorker`.

One step, seen from the host::

    plan ── pack ──▶ pinned words ── one copy ──▶ staging ── graph replay, or eager ──▶ drawn tokens ── copy ──▶ pinned
    host                            device, one stream, in the order of the plans                            result

`begin` returns when everything is launched. Drawn tokens stay in the token table on the device, where the next step
reads them. So the worker packs, copies and launches plan N + 1 while step N runs. `begin` waits for the device only
if a row needs more than a draw from the unmodified logits (penalties, log-probabilities), or if drafts are to be chosen or
were in the step before: they follow from tokens on the host.

For the sampler, kernels replace the torch operations and logits processors if available.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.device import Event
from quintet.executor.backends.cuda.device_step import DeviceStep
from quintet.executor.backends.cuda.draft_runner import DraftRunner
from quintet.executor.backends.cuda.head_drafter import ObservingDrafter
from quintet.executor.backends.cuda.ops.collectives import RankDesyncError
from quintet.executor.backends.cuda.ops.tables import PackedPlan, StagingLayout, Words, pack_staging
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.runner import DecodeGraph, Drawn
from quintet.executor.backends.cuda.sampling import sampling_ops, shaping_on
from quintet.executor.backends.cuda.step_clock import StepClock
from quintet.executor.backends.cuda.steps import DeviceSteps, PinnedRing
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.interface import Finished, Pending
from quintet.executor.oom_split import OomSplit
from quintet.executor.pooling import Pooler
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import Grammars
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import DRAFTERS, MakeDrafter
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.verify import DraftedStep, Speculation
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan, StepResult

EAGER_STEPS_PER_CAPTURE = 8
"""Under load, the worker captures one graph after this many decode steps that ran eagerly for lack of a graph."""


class DeviceWorker:
    """A loaded model on a device, with slot tables on host and device, the sampler and the graphs.

    It is also the sampler's `LogitsSource`.
    """

    def __init__(
        self,
        steps: DeviceSteps,
        config: EngineConfig,
        span: TraceSpan = no_span,
        broadcaster: RankBroadcaster | None = None,
        draft_layers: Sequence[DraftRunner] = (),
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        """broadcaster: given for rank 0 of several ranks; the other ranks launch the same steps.

        draft_layers: a draft model, or the layers of a head. make_drafter: constructor of their drafter.
        """
        self.runner = runner = steps.runner
        self.num_blocks = num_blocks = runner.pool.num_blocks
        self.facts = {"blocks": str(num_blocks)}
        self.steps, self._draft_layers = steps, draft_layers
        self._all_steps = [steps, *(layer.steps for layer in draft_layers)]
        self._head: ObservingDrafter | None = None
        self._device = device = runner.device
        self._broadcaster = broadcaster
        self._span = span
        scheduler, model = config.scheduler, config.model
        on_device = runner.tables
        self.tables = SlotTables(
            scheduler.max_num_seqs,
            model.max_model_len,
            model.kv,
            device.torch_device,
            on_device.token_ids,
        )
        self._speculation: Speculation | None = None
        self._unended: deque[DeviceStep] = deque()
        """Steps in flight, oldest first."""
        self._sampler, self._pooler = self._open_sampler(config, make_drafter), Pooler()
        self._masked: list[DeviceStep] = []
        """Steps with structured output; the grammar matchers may lack their tokens."""
        in_flight = scheduler.max_steps_in_flight + 1
        self._tokens = PinnedRing(device, in_flight + 1, runner.max_draws)
        self._clock = StepClock()
        self._newest_end: Event | None = None
        self._num_ended = 0
        pool = steps.host_pool
        self.num_host_blocks = 0 if pool is None else pool.num_blocks
        self.kv = None
        self._layout = StagingLayout.of(on_device, num_blocks, self.num_host_blocks)
        self.swap_bytes_per_s = 0
        if pool is not None:
            self.swap_bytes_per_s = pool.measure()
            self.facts["swap"] = f"{pool.num_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._oom_split = OomSplit(
            torch.cuda.empty_cache,  # does nothing without CUDA
            self.tables.continue_states if model.kv.has_states else None,
        )

    def _open_sampler(self, config: EngineConfig, make_drafter: MakeDrafter | None) -> Sampler:
        """Return the sampler; open speculative decoding if it is configured."""
        scheduler, model, device = config.scheduler, config.model, self._device
        speculative, max_num_seqs = scheduler.speculative, scheduler.max_num_seqs
        max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        grammars = Grammars(max_num_seqs, model, max_drafts=max_drafts)
        ops, shaping = sampling_ops(device), shaping_on(device)
        if speculative is None:
            return Sampler(max_num_seqs, model.vocab_size, self.tables, ops, shaping, grammars)
        on_host = self.tables.on_host()
        drafts: Words = on_host.token_ids.numpy()
        sampler = Sampler(max_num_seqs, model.vocab_size, self.tables, ops, shaping, grammars, drafts)
        if make_drafter is None:
            drafter = DRAFTERS[speculative.method](speculative, on_host)
        else:
            drafter = make_drafter(on_host, sampler)
        self._head = drafter if isinstance(drafter, ObservingDrafter) else None
        limits = self.runner.max_draws, scheduler.max_num_batched_tokens
        self._speculation = Speculation(drafter, on_host, grammars, *limits, copies_tokens=True)
        return sampler

    @property
    def work_done(self) -> int:
        """Number of completed steps and captured graphs."""
        return self._num_ended

    @property
    def num_active_slots(self) -> int:
        return self.tables.num_active_slots

    experts = None  # the device does not count expert use

    @property
    def output_cache(self) -> OutputCache | None:
        return None if self._speculation is None else self._speculation.drafter.output_cache

    @property
    def num_split(self) -> int:
        """Number of steps split after an out-of-memory error."""
        return self._oom_split.num_split

    @property
    def has_idle_tasks(self) -> bool:
        """True if graphs are left to capture while no step is in flight."""
        return any(steps.num_missing_graphs for steps in self._all_steps)

    @torch.inference_mode()
    def run_idle_task(self) -> None:
        """Capture the next graph. Those of a draft model, which only this rank has, come last."""
        steps = next(each for each in self._all_steps if each.num_missing_graphs)
        if steps is self.steps and self._broadcaster is not None:
            self._broadcaster.capture()
        with self._on_all_ranks():
            steps.capture_one()
        for each in self._all_steps:
            each.num_without_graph = 0
        self._num_ended += 1
        self._newest_end = None  # the idle time until the next step is not a gap of the loop

    def reset(self) -> None:
        """Clear every table. Steps in flight run before the next launch; their results are dropped."""
        self.tables.reset()
        self._masked.clear()
        self._unended.clear()
        if self._speculation is not None:
            self._speculation.reset()
        self._newest_end = None

    def is_broken(self, error: Exception) -> bool:
        """Return whether the device is unusable for this process, or the tables differ from the core's.

        After a kernel error, the process cannot use the device any more. Out of memory is recoverable.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(
            error, (*self._device.errors, torch.AcceleratorError, TablesDiffer, RankDesyncError)
        )

    def waits_for(self, plan: StepPlan) -> bool:
        """Return whether the plan's drafts follow from tokens in flight; without drafts, the device has them."""
        return self._speculation is not None and self._speculation.waits_for(plan)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Pending:
        """See `StepWorker.begin`. A step that runs out of memory is split and computed synchronously."""
        num_without_graph = sum(steps.num_without_graph for steps in self._all_steps)
        if num_without_graph >= EAGER_STEPS_PER_CAPTURE and self.has_idle_tasks:
            self.run_idle_task()
        while self.waits_for(plan):
            self._unended[0].result()
        if self._speculation is not None:
            self._speculation.end_requests(plan)
        self.tables.note(plan)
        if plan.checksum:
            check_tables(plan, self.tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        if self._speculation is not None:
            self._speculation.note(plan)
        drafted = self._begin_drafts(plan)
        if drafted is not None and drafted.asked is not None and self._draft_layers:
            self._newest_end = None  # the device computed drafts since then
        self._span("tables", plan.step)
        packed, words, staging = self._upload(plan, drafted)
        start = self._device.record()  # after packing, during which the device may be idle
        self.steps.move_blocks(packed, staging)
        if not self._oom_split.is_to_be_cut(plan):
            try:
                return self._launch(plan, drafted, packed, words, staging, start)
            except torch.OutOfMemoryError as error:
                self._oom_split.note_shortage(plan, error)
        if self._speculation is not None and drafted is not None:
            self._speculation.cancel(drafted)
        for step in tuple(self._unended):
            step.result()
        # Outside the handler: the traceback keeps the attempt's tensors alive.
        # Swaps and copies are dropped, because they were launched already and are not idempotent.
        rest = msgspec.structs.replace(plan, swaps_out=b"", swaps_in=b"", copies=b"")
        return Finished(self._oom_split.compute_in_parts(rest, self._compute_now))

    def _compute_now(self, plan: StepPlan) -> StepResult:
        drafted = self._begin_drafts(plan)
        try:
            packed, words, staging = self._upload(plan, drafted)
            return self._launch(plan, drafted, packed, words, staging, self._device.record()).result()
        except torch.OutOfMemoryError:
            if self._speculation is not None and drafted is not None:
                self._speculation.cancel(drafted)
            raise

    def _begin_drafts(self, plan: StepPlan) -> DraftedStep | None:
        """Choose the drafts of a plan; None without speculative decoding."""
        if self._speculation is None or not plan.drafts:
            return None
        for step in self._masked:  # the tokens that grammars force follow from all outputs
            if step.is_ended:
                step.advance_matchers()
        for layer in self._draft_layers[:1]:
            layer.note(plan)
        try:
            return self._speculation.begin(plan)
        except torch.OutOfMemoryError as error:
            plan = self._oom_split.without_drafts(plan, error)
        return self._speculation.begin(plan)  # outside the handler: its traceback keeps tensors alive

    def _launch(
        self,
        plan: StepPlan,
        drafted: DraftedStep | None,
        packed: PackedPlan,
        words: Words,
        staging: torch.Tensor,
        start: Event,
    ) -> Pending:
        """Launch a plan or a part of one; the host's tables already include its deltas."""
        result = StepResult(plan.step, 0, b"")
        if drafted is not None:
            plan = drafted.plan
        if not packed.num_rows:
            if self._broadcaster is not None:
                self._broadcaster.step(words, packed, None)
            self.runner.apply_deltas(staging)
            return Finished(result)
        rows = Rows(plan)
        self.runner.put_drafts(staging[packed.drafts])
        with self._on_all_ranks():  # rank 0 has moved its blocks; the others move theirs with the step
            embeds = embeds_of(rows, self.runner.dtype, self._device.torch_device)
            graph = self.steps.graph_of(packed, staging, embeds)
            drawn = self._compute(plan, packed, words, staging, embeds, graph)
            self._span("layers")
            result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self)
            if plan.pooled_rows:  # waits for the device
                result.vectors = self._pooler.pool(rows, self.runner)
        if self._head is not None:  # only rank 0 has it
            drafts = () if drafted is None else drafted.drafts
            self._head.note_launched(rows, drafts, self.runner.kept_hidden[: packed.num_tokens])
        tokens = drawn.tokens[: packed.num_sampled]
        self._advance_matchers()
        masks = self._sampler.begin_masks(rows)
        if packed.num_sampled and (masks is not None or self._sampler.needs_logits(rows)):
            logits = drawn.logits[: packed.num_sampled]
            self.runner.put_drafts(staging[packed.drafts])  # in place of draws from the unmodified logits
            tokens, result.logprobs = self._sampler.draw(
                rows, logits, None if masks is None else masks.wait()
            )
            if masks is not None:
                result.failed = masks.failed(rows.sampling)
        buffer = self._tokens.take()
        on_host = buffer.host[: packed.num_sampled]
        on_host.copy_(tokens, non_blocking=True)
        end = buffer.free_after = self._device.record()
        previous_end, self._newest_end = self._newest_end, end
        self._span("sampling")
        size = None if graph is None else graph.size
        step = DeviceStep(
            *(result, start, end, previous_end, on_host, self._on_end),
            *(self._clock, size, self._clock.launched(size), rows, drafted, masks),
        )
        self._unended.append(step)
        if masks is not None:
            self._masked.append(step)
        return step

    def _advance_matchers(self) -> None:
        """Advance the grammar matchers by the tokens of earlier steps, while the device computes the current layers."""
        for step in self._masked:
            step.advance_matchers()
        self._masked.clear()

    @property
    def max_outputs(self) -> int:
        return self.runner.max_outputs

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.runner.LogitsSource`; gathered from all ranks."""
        if self._broadcaster is not None:
            self._broadcaster.logits(tokens)
        return self.runner.logits(tokens)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Turn an error within the context into `RankDesyncError` if other ranks have received the order.

        The other ranks would wait for launches that rank 0 did not make.
        """
        try:
            yield
        except Exception as error:
            if self._broadcaster is None:
                raise
            raise RankDesyncError(
                f"rank 0 did not complete the launches that the other ranks made: {error}"
            ) from error

    def _on_end(self, step: DeviceStep) -> None:
        if self.runner.communicator is not None:
            self.runner.communicator.peers.check()
        self._num_ended += 1
        assert self._unended[0] is step, "steps end in order"
        self._unended.popleft()
        if step.drafted is None:
            return
        if step.drafted.drafts and step.masks is not None:  # a grammar may fail after an accepted draft
            step.advance_matchers()
            step.outcome.failed = step.masks.failed(step.rows.sampling)
        assert self._speculation is not None
        self._speculation.end(step.drafted, step.outcome)

    def _upload(self, plan: StepPlan, drafted: DraftedStep | None) -> tuple[PackedPlan, Words, torch.Tensor]:
        """Copy a plan's words to the device; return the packed plan, the words and the staging tensor."""
        drafts = None
        if drafted is not None:
            plan = drafted.plan
            if drafted.drafts:
                drafts = np.concatenate([tokens for _, tokens in drafted.drafts])
        buffer = self.steps.buffer_for(self._layout.num_words(plan))
        packed = pack_staging(plan, self._layout, buffer.words, drafts)
        return packed, buffer.words, self.steps.send(buffer, packed.num_words)

    def _compute(
        self,
        plan: StepPlan,
        packed: PackedPlan,
        words: Words,
        staging: torch.Tensor,
        embeds: StepEmbeds | None,
        graph: DecodeGraph | None,
    ) -> Drawn:
        if self._broadcaster is not None:
            self._broadcaster.step(words, packed, embeds, None if graph is None else graph.size)
        if graph is not None:
            return graph.replay()
        host = HostRows(np.frombuffer(plan.starts, np.int32), np.frombuffer(plan.counts, np.int32))
        return self.steps.compute(packed, staging, host, embeds)
