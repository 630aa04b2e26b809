"""Executes plans on a device that computes in its own time. A `quintet.executor.interface.StepWorker`.

A step, from the host's side::

    plan ── pack ──▶ pinned words ── one copy ──▶ staging ── graph, or kernel by kernel ──▶ drawn tokens ── copy ──▶ pinned
    host                            device, in the order of the plans                                               result

`begin` returns when everything is launched. The tokens that a step draws stay on the device, in the token table, where
the next step finds them: plan N + 1 is packed, copied and launched while step N computes. Only rows that ask for more than
a draw from the model's own logits (penalties, log-probabilities) make `begin` wait, for what it reports of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.audit import TablesDiffer, check_tables
from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.device import Event
from quintet.executor.backends.cuda.group import DeviceGroup
from quintet.executor.backends.cuda.ops.peers import RanksApart
from quintet.executor.backends.cuda.ops.tables import PackedPlan, StagingLayout, Words, pack_staging
from quintet.executor.backends.cuda.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.runner import DecodeGraph, Drawn
from quintet.executor.backends.cuda.sampling import sampling_ops, shaping_on
from quintet.executor.backends.cuda.staging import PinnedRing
from quintet.executor.backends.cuda.step_clock import StepClock
from quintet.executor.backends.cuda.steps import DeviceSteps
from quintet.executor.batch import Int, Rows
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.interface import Finished, Pending
from quintet.executor.oom_split import OomSplit
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import SlotTables
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
    """May raise what makes the tokens worthless."""
    _clock: StepClock
    _graph_rows: int | None
    """Of the graph that computes it."""
    _expected_end_s: float | None
    device_ms: float | None = None
    gap_ms: float | None = None

    def wait(self) -> None:
        """See `Pending`."""
        self._ended.wait(self._expected_end_s)

    def drawn(self) -> NDArray[np.int32]:
        """Return the tokens, int32[num_sampled], once the step has ended. Later steps overwrite them."""
        self._ended.wait()
        tokens: NDArray[np.int32] = self._tokens.numpy()
        return tokens

    def result(self) -> StepResult:
        """See `Pending`."""
        self._ended.wait()
        self.device_ms = self._ended.elapsed_ms(self._begun)
        self._clock.ended(self._graph_rows, self.device_ms)
        if self._before is not None:
            self.gap_ms = self._begun.elapsed_ms(self._before)
        self._on_end()
        self.outcome.token_ids = self._tokens.numpy().tobytes()
        return self.outcome


class DeviceWorker:
    """A loaded model on a device with the tables of both sides, the sampler and the graphs."""

    def __init__(
        self,
        steps: DeviceSteps,
        config: EngineConfig,
        num_blocks: int,
        facts: Mapping[str, str],
        span: Span = no_span,
        group: DeviceGroup | None = None,
        teller: RankBroadcaster | None = None,
    ) -> None:
        """group, teller: of the first of several ranks, which the others follow."""
        self.num_blocks = num_blocks
        self.facts = {**facts, "blocks": str(num_blocks)}
        self.runner = runner = steps.runner
        self.steps = steps
        self._device = device = runner.device
        self._group = group
        self._teller = teller
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
        in_flight = scheduler.max_steps_in_flight + 1
        self._tokens = PinnedRing(device, in_flight + 1, scheduler.max_num_seqs)
        self._num_without_graph = 0
        self._clock = StepClock()
        self._newest_end: Event | None = None
        self._num_ended = 0
        is_gpu = device.torch_device.type == "cuda"
        pool = steps.host_pool
        self.num_host_blocks = 0 if pool is None else pool.num_blocks
        self.kv_disk = self.kv_peers = self.kv_store = None
        self._layout = StagingLayout.of(on_device, num_blocks, self.num_host_blocks)
        self.swap_bytes_per_s = 0
        if pool is not None:
            self.swap_bytes_per_s = pool.measure()
            self.facts["swap"] = f"{pool.num_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._smaller_steps = OomSplit(
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
        return self.steps.graphs is not None and self.steps.graphs.num_missing > 0

    @torch.inference_mode()
    def do_chore(self) -> None:
        """Capture the next graph."""
        assert self.steps.graphs is not None
        if self._teller is not None:
            self._teller.capture()
        with self._together():
            self.steps.graphs.capture_one()
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
        return isinstance(error, (*self._device.errors, torch.AcceleratorError, TablesDiffer, RanksApart))

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
        packed, words, staging = self._upload(plan)
        begun = self._device.record()  # behind the packing: that is time in which the device may rest
        self.steps.move_blocks(packed, staging)
        if not self._smaller_steps.is_to_be_cut(plan):
            try:
                return self._launch(plan, packed, words, staging, begun)
            except torch.OutOfMemoryError as error:
                self._smaller_steps.note_shortage(plan, error)
        # Outside of the handler: the traceback keeps the attempt's tensors alive.
        # Blocks move once: by now one that was copied out may hold what was copied in.
        rest = msgspec.structs.replace(plan, swaps_out=b"", swaps_in=b"", copies=b"")
        return Finished(self._smaller_steps.compute_in_parts(rest, self._compute_now))

    def _compute_now(self, plan: StepPlan) -> StepResult:
        packed, words, staging = self._upload(plan)
        return self._launch(plan, packed, words, staging, self._device.record()).result()

    def _launch(
        self, plan: StepPlan, packed: PackedPlan, words: Words, staging: torch.Tensor, begun: Event
    ) -> Pending:
        """Launch what a plan, or a part of one, computes; the host's tables hold its deltas."""
        result = StepResult(plan.step, 0, b"")
        if not packed.num_rows:
            if self._teller is not None:
                self._teller.step(words, packed, None)
            self.runner.apply_deltas(staging)
            return Finished(result)
        rows = Rows(plan)
        with self._together():  # blocks have moved here, which the others are told with the step
            embeds = embeds_of(rows, self.runner.dtype, self._device.torch_device)
            graph = self.steps.graph_of(packed, staging, embeds)
            drawn = self._compute(plan, packed, words, staging, embeds, graph)
            self._span("layers")
            result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self)
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
        graph_rows = None if graph is None else graph.num_rows
        step = DeviceStep(
            *(result, begun, ended, before, on_host, self._count),
            *(self._clock, graph_rows, self._clock.launched(graph_rows)),
        )
        if masks is not None:
            self._untold.append((masks, step))
        return step

    def _tell_matchers(self) -> None:
        """Wait for the steps before that drew structured outputs, while the device computes the layers of the one behind them."""
        for masks, step in self._untold:
            masks.note(step.drawn().tolist())
        self._untold.clear()

    @property
    def max_outputs(self) -> int:
        """See `quintet.executor.runner.GivesLogits`."""
        return self.runner.max_outputs

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.runner.GivesLogits`: of all ranks' parts."""
        if self._teller is not None:
            self._teller.logits(tokens)
        return self.runner.logits(tokens)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Between what the others are told and what is launched here nothing may go wrong: they would wait for the rest of it."""
        try:
            yield
        except Exception as error:
            if self._teller is None:
                raise
            raise RanksApart(f"rank 0 launched less than it told the others: {error}") from error

    def _count(self) -> None:
        if self._group is not None:
            self._group.check()
        self._num_ended += 1

    def _upload(self, plan: StepPlan) -> tuple[PackedPlan, Words, torch.Tensor]:
        """Copy a plan's words to the device; return them, and where they are there."""
        room = self.steps.room_for(self._layout.num_words(plan))
        packed = pack_staging(plan, self._layout, room.words)
        return packed, room.words, self.steps.send(room, packed.num_words)

    def _compute(
        self,
        plan: StepPlan,
        packed: PackedPlan,
        words: Words,
        staging: torch.Tensor,
        embeds: StepEmbeds | None,
        graph: DecodeGraph | None,
    ) -> Drawn:
        if self._teller is not None:
            self._teller.step(words, packed, embeds, None if graph is None else graph.num_rows)
        if graph is not None:
            return graph.replay()
        self._num_without_graph += self.steps.could_be_captured(packed, staging, embeds)
        host = HostRows(np.frombuffer(plan.starts, np.int32), np.frombuffer(plan.counts, np.int32))
        return self.steps.compute(packed, staging, host, embeds)


def _nothing() -> None:
    """Nobody keeps memory for later."""
