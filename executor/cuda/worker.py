"""Executes plans on a device that computes in its own time. A `quintet.executor.interface.StepWorker`.

A step, from the host's side::

    plan ── pack ──▶ pinned words ── one copy ──▶ staging ── graph, or kernel by kernel ──▶ drawn tokens ── copy ──▶ pinned
    host                            device, in the order of the plans                                               result

`begin` returns when everything is launched. The tokens that a step draws stay on the device, in the token table, where
the next step finds them: plan N + 1 is packed, copied and launched while step N computes. Only rows that ask for more than
a draw from the model's own logits (penalties, log-probabilities) make `begin` wait, for what it reports of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.audit import TablesDiffer, check_tables
from quintet.executor.batch import Rows
from quintet.executor.cuda.attention.backend import HostRows
from quintet.executor.cuda.device import Device, Event
from quintet.executor.cuda.graphs import DecodeGraphs
from quintet.executor.cuda.host_pool import HostPool
from quintet.executor.cuda.ops.tables import PackedPlan, StagingLayout, pack_staging
from quintet.executor.cuda.runner import DecodeGraph, DeviceRunner, Drawn
from quintet.executor.cuda.sampling import sampling_ops, shaping_on
from quintet.executor.cuda.staging import PinnedRing
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.interface import Finished, Pending
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import SlotTables
from quintet.executor.smaller_steps import SmallerSteps
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan, StepResult

EAGER_STEPS_PER_CAPTURE = 8
"""A busy server captures one graph each time that so many decode steps had none: a pause now for shorter steps from then on."""


@dataclass(slots=True)
class DeviceStep:
    """A step that was launched. A `quintet.executor.interface.Pending`."""

    outcome: StepResult
    _begun: Event
    _ended: Event
    _before: Event | None
    """The end of the step before it."""
    _tokens: torch.Tensor
    """int32[num_sampled], pinned: there once the step has ended."""
    _on_end: Callable[[], None]
    device_ms: float | None = None
    gap_ms: float | None = None

    def wait(self) -> None:
        """See `Pending`."""
        self._ended.wait()

    def drawn(self) -> NDArray[np.int32]:
        """Return the tokens, int32[num_sampled], once the step has ended. Later steps overwrite them."""
        self._ended.wait()
        tokens: NDArray[np.int32] = self._tokens.numpy()
        return tokens

    def result(self) -> StepResult:
        """See `Pending`."""
        self._ended.wait()
        self.device_ms = self._ended.elapsed_ms(self._begun)
        if self._before is not None:
            self.gap_ms = self._begun.elapsed_ms(self._before)
        self.outcome.token_ids = self._tokens.numpy().tobytes()
        self._on_end()
        return self.outcome


class DeviceWorker:
    """A loaded model on a device with the tables of both sides, the sampler and the graphs."""

    def __init__(
        self,
        device: Device,
        runner: DeviceRunner,
        staging: torch.Tensor,
        config: EngineConfig,
        num_blocks: int,
        facts: Mapping[str, str],
        span: Span = no_span,
    ) -> None:
        """staging: int32, the runner's."""
        self.num_blocks = num_blocks
        self.facts = {**facts, "blocks": str(num_blocks)}
        self.runner = runner
        self._device = device
        self._staging = staging
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
        self._sampler = Sampler(
            scheduler.max_num_seqs,
            model.vocab_size,
            self.tables,
            sampling_ops(device, SamplingOps()),
            shaping_on(device),
            Grammars(scheduler.max_num_seqs, model),
        )
        self._untold: list[tuple[StepMasks, DeviceStep]] = []
        """Steps with structured outputs, whose matchers have not heard what was drawn."""
        in_flight = scheduler.depth + 1
        self._words = PinnedRing(device, in_flight, len(staging))
        self._tokens = PinnedRing(device, in_flight + 1, scheduler.max_num_seqs)
        self._graphs: DecodeGraphs[DecodeGraph] | None = None
        if not config.executor.enforce_eager:
            self._graphs = DecodeGraphs(scheduler.max_num_seqs, runner.capture_decode)
        self._num_without_graph = 0
        self._newest_end: Event | None = None
        self._num_ended = 0
        is_gpu = device.torch_device.type == "cuda"
        num_host_blocks = model.kv.num_blocks(config.cache.swap_bytes)
        self._host_pool = HostPool(device, runner.pool, num_host_blocks) if num_host_blocks else None
        self.num_host_blocks = num_host_blocks
        self.kv_disk = self.kv_peers = self.kv_store = None
        self._layout = StagingLayout.of(on_device, num_blocks, num_host_blocks)
        self.swap_bytes_per_s = 0
        if self._host_pool is not None:
            self.swap_bytes_per_s = self._host_pool.measure()
            self.facts["swap"] = f"{num_host_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._smaller_steps = SmallerSteps(
            torch.cuda.empty_cache if is_gpu else _nothing,
            self.tables.go_on if model.kv.has_states else None,
        )

    @property
    def work_done(self) -> int:
        """Steps that the device has completed, and graphs that were captured."""
        return self._num_ended

    @property
    def num_tenants(self) -> int:
        """Slots that have a tenant."""
        return self.tables.num_tenants

    experts = None  # nobody counts on the device

    @property
    def num_split(self) -> int:
        """Steps that were computed in parts."""
        return self._smaller_steps.num_split

    @property
    def has_chores(self) -> bool:
        """Whether there is something to do for later while nothing is in flight: graphs to capture."""
        return self._graphs is not None and self._graphs.num_missing > 0

    @torch.inference_mode()
    def do_chore(self) -> None:
        """Capture the next graph."""
        assert self._graphs is not None
        self._graphs.capture_one()
        self._num_without_graph = 0
        self._num_ended += 1
        self._newest_end = None  # the device's rest until the next step says nothing about the loop

    def reset(self) -> None:
        """Empty every table. What is still in flight comes before whatever is launched next, and nobody asks for it."""
        self.tables.reset()
        self._untold.clear()
        self._newest_end = None

    def is_broken(self, error: Exception) -> bool:
        """Return whether the device is lost to this process, or the tables are not what the core believes.

        The first error that a kernel reports ends the use of the device by its process, except that it ran out of memory.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, (*self._device.errors, torch.AcceleratorError, TablesDiffer))

    def waits_for(self, plan: StepPlan) -> bool:
        """What a step draws is on the device, where the next one finds it."""
        return False

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Pending:
        """See `StepWorker.begin`. A step for which memory runs out is computed in parts, and waited for."""
        if self._num_without_graph >= EAGER_STEPS_PER_CAPTURE and self.has_chores:
            self.do_chore()
        self.tables.note(plan)
        check_tables(plan, self.tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        self._span("tables", plan.step)
        packed, staging = self._upload(plan)
        begun = self._device.record()  # behind the packing: that is time in which the device may rest
        self._move_blocks(packed, staging)
        if not self._smaller_steps.is_to_be_cut(plan):
            try:
                return self._launch(plan, packed, staging, begun)
            except torch.OutOfMemoryError as error:
                self._smaller_steps.note_shortage(plan, error)
        # Outside of the handler: the traceback keeps the attempt's tensors alive.
        # Blocks move once: by now one that was copied out may hold what was copied in.
        rest = msgspec.structs.replace(plan, swaps_out=b"", swaps_in=b"", copies=b"")
        return Finished(self._smaller_steps.compute_in_parts(rest, self._compute_now))

    def _compute_now(self, plan: StepPlan) -> StepResult:
        packed, staging = self._upload(plan)
        return self._launch(plan, packed, staging, self._device.record()).result()

    def _move_blocks(self, packed: PackedPlan, staging: torch.Tensor) -> None:
        if self._host_pool is not None:
            self._host_pool.copy_out(staging[packed.swaps_out])
            self._host_pool.copy_in(staging[packed.swaps_in])
        self.runner.copy_blocks(staging[packed.copies])

    def _launch(self, plan: StepPlan, packed: PackedPlan, staging: torch.Tensor, begun: Event) -> Pending:
        """Launch what a plan, or a part of one, computes; the host's tables hold its deltas."""
        result = StepResult(plan.step, 0, b"")
        if not packed.num_rows:
            self.runner.apply_deltas(staging)
            return Finished(result)
        rows = Rows(plan)
        embeds = embeds_of(rows, self.runner.dtype, self._device.torch_device)
        drawn = self._compute(plan, packed, staging, embeds)
        self._span("layers")
        result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self.runner)
        tokens = drawn.tokens[: packed.num_sampled]
        self._tell_matchers()
        masks = self._sampler.begin_masks(rows)
        if packed.num_sampled and (masks is not None or self._sampler.wants_more(rows)):
            logits = drawn.logits[: packed.num_sampled]
            tokens, result.logprobs = self._sampler.draw(
                rows, logits, None if masks is None else masks.wait()
            )
            if masks is not None:
                result.failed = masks.failed(rows.sampling)
        buffer = self._tokens.take()
        on_host = buffer.host[: packed.num_sampled]
        on_host.copy_(tokens, non_blocking=True)
        ended = buffer.free_after = self._device.record()
        before, self._newest_end = self._newest_end, ended
        self._span("sampling")
        step = DeviceStep(result, begun, ended, before, on_host, self._count)
        if masks is not None:
            self._untold.append((masks, step))
        return step

    def _tell_matchers(self) -> None:
        """Wait for the steps before that drew structured outputs, while the device computes the layers of the one behind them."""
        for masks, step in self._untold:
            masks.note(step.drawn().tolist())
        self._untold.clear()

    def _count(self) -> None:
        self._num_ended += 1

    def _upload(self, plan: StepPlan) -> tuple[PackedPlan, torch.Tensor]:
        """Copy a plan's words to the device; return where they are, usually the buffer that graphs read."""
        num_words = self._layout.num_words(plan)
        if num_words > len(self._staging):
            # Prompts longer than the buffer, all at once: too rare to keep memory for.
            words = torch.empty(num_words, dtype=torch.int32)
            packed = pack_staging(plan, self._layout, words.numpy())
            return packed, words.to(self._device.torch_device)
        buffer = self._words.take()
        packed = pack_staging(plan, self._layout, buffer.host.numpy())
        self._staging[: packed.num_words].copy_(buffer.host[: packed.num_words], non_blocking=True)
        buffer.free_after = self._device.record()
        return packed, self._staging

    def _compute(
        self, plan: StepPlan, packed: PackedPlan, staging: torch.Tensor, embeds: StepEmbeds | None
    ) -> Drawn:
        is_decode = packed.num_tokens == packed.num_rows == packed.num_sampled and embeds is None
        if is_decode and self._graphs is not None and staging is self._staging:
            graph = self._graphs.find(packed.num_rows)
            if graph is not None:
                return graph.replay()
            self._num_without_graph += 1
        host = HostRows(np.frombuffer(plan.starts, np.int32), np.frombuffer(plan.counts, np.int32))
        return self.runner.compute(
            *(staging, packed.num_rows, packed.num_tokens, packed.max_count, packed.num_sampled),
            *(host, embeds),
        )


def _nothing() -> None:
    """Nobody keeps memory for later."""
