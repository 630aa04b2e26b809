"""Executes plans asynchronously on a device; implements `quintet.executor.interface.StepWorker`.

One step, seen from the host::

    plan ── pack ──▶ pinned words ── one copy ──▶ staging ── graph replay, or eager ──▶ drawn tokens ── copy ──▶ pinned
    host                            device, one stream, in the order of the plans                            result

`begin` returns when everything is launched. Drawn tokens stay in the token table on the device, where the next step
reads them. So the worker packs, copies and launches plan N + 1 while step N runs. `begin` waits for the device only
if a row needs more than a draw from the unmodified logits (penalties, log-probabilities).

For the sampler, kernels replace the torch operations and logits processors if available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.device import Device, Event
from quintet.executor.backends.cuda.ops.draw import DeviceDraw
from quintet.executor.backends.cuda.ops.entries import DeviceReport
from quintet.executor.backends.cuda.ops.peers import RankDesyncError
from quintet.executor.backends.cuda.ops.penalties import DevicePenalties
from quintet.executor.backends.cuda.ops.tables import PackedPlan, StagingLayout, Words, pack_staging
from quintet.executor.backends.cuda.ranks.communicator import DeviceCommunicator
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.runner import DecodeGraph, Drawn
from quintet.executor.backends.cuda.step_clock import StepClock
from quintet.executor.backends.cuda.steps import DeviceSteps, PinnedRing
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.interface import Finished, Pending
from quintet.executor.oom_split import OomSplit
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.logits_processor import LogitsProcessor
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.sampler import SHAPING, Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan, StepResult


def sampling_ops(device: Device, ops: SamplingOps) -> SamplingOps:
    """Return ``ops`` with the device's draw and log-probability kernels."""
    return replace(ops, draw=DeviceDraw(device), entries=DeviceReport(device))


def shaping_on(device: Device) -> tuple[Callable[[int, int], LogitsProcessor], ...]:
    """Return `SHAPING` in order, with the device's penalties kernel."""

    def penalties(max_num_seqs: int, _vocab_size: int) -> LogitsProcessor:
        return DevicePenalties(device, max_num_seqs)

    return tuple(penalties if make is Penalties else make for make in SHAPING)


EAGER_STEPS_PER_CAPTURE = 8
"""Under load, the worker captures one graph after this many decode steps that ran eagerly for lack of a graph."""


@dataclass(slots=True)
class DeviceStep:
    """A launched step; implements `quintet.executor.interface.Pending`."""

    outcome: StepResult
    _start: Event
    _end: Event
    _previous_end: Event | None
    """End of the previous step."""
    _tokens: torch.Tensor
    """int32[num_sampled], pinned; valid once the step has ended."""
    _on_end: Callable[[], None]
    """May raise an error that invalidates the tokens."""
    _clock: StepClock
    _graph_rows: int | None
    """Padded size of the replayed graph; None for an eager step."""
    _expected_end_s: float | None
    device_ms: float | None = None
    gap_ms: float | None = None

    def wait(self) -> None:
        """See `Pending`."""
        self._end.wait(self._expected_end_s)

    def drawn(self) -> NDArray[np.int32]:
        """Wait for the step and return its tokens, int32[num_sampled]. Later steps overwrite them."""
        self._end.wait()
        tokens: NDArray[np.int32] = self._tokens.numpy()
        return tokens

    def result(self) -> StepResult:
        """See `Pending`."""
        self._end.wait()
        self.device_ms = self._end.elapsed_ms(self._start)
        self._clock.ended(self._graph_rows, self.device_ms)
        if self._previous_end is not None:
            self.gap_ms = self._start.elapsed_ms(self._previous_end)
        self._on_end()
        self.outcome.token_ids = self._tokens.numpy().tobytes()
        return self.outcome


class DeviceWorker:
    """A loaded model on a device, with slot tables on host and device, the sampler and the graphs."""

    def __init__(
        self,
        steps: DeviceSteps,
        config: EngineConfig,
        num_blocks: int,
        span: TraceSpan = no_span,
        communicator: DeviceCommunicator | None = None,
        broadcaster: RankBroadcaster | None = None,
    ) -> None:
        """communicator, broadcaster: given for rank 0 of several ranks; the other ranks launch the same steps."""
        self.num_blocks = num_blocks
        self.facts = {"blocks": str(num_blocks)}
        self.runner = runner = steps.runner
        self.steps = steps
        self._device = device = runner.device
        self._communicator = communicator
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
        self._sampler = Sampler(
            scheduler.max_num_seqs,
            model.vocab_size,
            self.tables,
            sampling_ops(device, SamplingOps()),
            shaping_on(device),
            Grammars(scheduler.max_num_seqs, model),
        )
        self._pending_masks: list[tuple[StepMasks, DeviceStep]] = []
        """Steps with structured output; the grammar matchers have not consumed their tokens yet."""
        in_flight = scheduler.max_steps_in_flight + 1
        self._tokens = PinnedRing(device, in_flight + 1, scheduler.max_num_seqs)
        self._num_without_graph = 0
        self._clock = StepClock()
        self._newest_end: Event | None = None
        self._num_ended = 0
        is_gpu = device.torch_device.type == "cuda"
        pool = steps.host_pool
        self.num_host_blocks = 0 if pool is None else pool.num_blocks
        self.kv = None
        self._layout = StagingLayout.of(on_device, num_blocks, self.num_host_blocks)
        self.swap_bytes_per_s = 0
        if pool is not None:
            self.swap_bytes_per_s = pool.measure()
            self.facts["swap"] = f"{pool.num_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._oom_split = OomSplit(
            torch.cuda.empty_cache if is_gpu else _no_cache,
            self.tables.continue_states if model.kv.has_states else None,
        )

    @property
    def work_done(self) -> int:
        """Number of completed steps and captured graphs."""
        return self._num_ended

    @property
    def num_active_slots(self) -> int:
        """Number of active slots."""
        return self.tables.num_active_slots

    experts = None  # the device does not count expert use
    output_cache = None

    @property
    def num_split(self) -> int:
        """Number of steps split after an out-of-memory error."""
        return self._oom_split.num_split

    @property
    def has_idle_tasks(self) -> bool:
        """True if graphs are left to capture while no step is in flight."""
        return self.steps.graphs is not None and self.steps.graphs.num_missing > 0

    @torch.inference_mode()
    def run_idle_task(self) -> None:
        """Capture the next graph."""
        assert self.steps.graphs is not None
        if self._broadcaster is not None:
            self._broadcaster.capture()
        with self._on_all_ranks():
            self.steps.graphs.capture_one()
        self._num_without_graph = 0
        self._num_ended += 1
        self._newest_end = None  # the idle time until the next step is not a gap of the loop

    def reset(self) -> None:
        """Clear every table. Steps in flight run before the next launch; their results are dropped."""
        self.tables.reset()
        self._pending_masks.clear()
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
        """Return False: the next step reads drawn tokens from the device."""
        return False

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Pending:
        """See `StepWorker.begin`. A step that runs out of memory is split and computed synchronously."""
        if self._num_without_graph >= EAGER_STEPS_PER_CAPTURE and self.has_idle_tasks:
            self.run_idle_task()
        self.tables.note(plan)
        if plan.checksum:
            check_tables(plan, self.tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        self._span("tables", plan.step)
        packed, words, staging = self._upload(plan)
        start = self._device.record()  # after packing, during which the device may be idle
        self.steps.move_blocks(packed, staging)
        if not self._oom_split.is_to_be_cut(plan):
            try:
                return self._launch(plan, packed, words, staging, start)
            except torch.OutOfMemoryError as error:
                self._oom_split.note_shortage(plan, error)
        # Outside the handler: the traceback keeps the attempt's tensors alive.
        # Swaps and copies are dropped, because they were launched already and are not idempotent.
        rest = msgspec.structs.replace(plan, swaps_out=b"", swaps_in=b"", copies=b"")
        return Finished(self._oom_split.compute_in_parts(rest, self._compute_now))

    def _compute_now(self, plan: StepPlan) -> StepResult:
        packed, words, staging = self._upload(plan)
        return self._launch(plan, packed, words, staging, self._device.record()).result()

    def _launch(
        self, plan: StepPlan, packed: PackedPlan, words: Words, staging: torch.Tensor, start: Event
    ) -> Pending:
        """Launch a plan or a part of one; the host's tables already include its deltas."""
        result = StepResult(plan.step, 0, b"")
        if not packed.num_rows:
            if self._broadcaster is not None:
                self._broadcaster.step(words, packed, None)
            self.runner.apply_deltas(staging)
            return Finished(result)
        rows = Rows(plan)
        with self._on_all_ranks():  # rank 0 has moved its blocks; the others move theirs with the step
            embeds = embeds_of(rows, self.runner.dtype, self._device.torch_device)
            graph = self.steps.graph_of(packed, staging, embeds)
            drawn = self._compute(plan, packed, words, staging, embeds, graph)
            self._span("layers")
            result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self)
        tokens = drawn.tokens[: packed.num_sampled]
        self._advance_matchers()
        masks = self._sampler.begin_masks(rows)
        if packed.num_sampled and (masks is not None or self._sampler.needs_logits(rows)):
            logits = drawn.logits[: packed.num_sampled]
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
        graph_rows = None if graph is None else graph.num_rows
        step = DeviceStep(
            *(result, start, end, previous_end, on_host, self._count),
            *(self._clock, graph_rows, self._clock.launched(graph_rows)),
        )
        if masks is not None:
            self._pending_masks.append((masks, step))
        return step

    def _advance_matchers(self) -> None:
        """Advance the grammar matchers by the tokens of earlier steps, while the device computes the current layers."""
        for masks, step in self._pending_masks:
            masks.note(step.drawn().tolist())
        self._pending_masks.clear()

    @property
    def max_outputs(self) -> int:
        """See `quintet.executor.runner.LogitsSource`."""
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

    def _count(self) -> None:
        if self._communicator is not None:
            self._communicator.check()
        self._num_ended += 1

    def _upload(self, plan: StepPlan) -> tuple[PackedPlan, Words, torch.Tensor]:
        """Copy a plan's words to the device; return the packed plan, the words and the staging tensor."""
        buffer = self.steps.buffer_for(self._layout.num_words(plan))
        packed = pack_staging(plan, self._layout, buffer.words)
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
            self._broadcaster.step(words, packed, embeds, None if graph is None else graph.num_rows)
        if graph is not None:
            return graph.replay()
        self._num_without_graph += self.steps.is_graph_shape(packed, staging, embeds)
        host = HostRows(np.frombuffer(plan.starts, np.int32), np.frombuffer(plan.counts, np.int32))
        return self.steps.compute(packed, staging, host, embeds)


def _no_cache() -> None:
    """Do nothing: torch caches no memory for this device."""
