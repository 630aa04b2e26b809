"""One device's half of a plan: its words are copied there, its blocks moved, its rows computed, launched or as a graph.

Knows no plan, only what was packed of one: so every rank of several does the same by what rank 0 tells it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.graphs import DecodeGraphs
from quintet.executor.backends.cuda.host_pool import HostPool
from quintet.executor.backends.cuda.ops.peers import RanksApart
from quintet.executor.backends.cuda.ops.tables import PackedPlan, Words
from quintet.executor.backends.cuda.runner import DecodeGraph, DeviceRunner, Drawn
from quintet.executor.backends.cuda.staging import PinnedBuffer, PinnedRing
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.embeds import StepEmbeds
from quintet.wire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Where the words of a plan are packed."""

    host: torch.Tensor
    """int32"""
    _buffer: PinnedBuffer | None
    """None where the plan is longer than a buffer: prompts longer than it, all at once, too rare to keep memory for."""

    @property
    def words(self) -> Words:
        """The same, for numpy."""
        words: Words = self.host.numpy()
        return words


class DeviceSteps:
    """What is launched for plans, in their order."""

    def __init__(
        self,
        runner: DeviceRunner,
        staging: torch.Tensor,
        config: EngineConfig,
        ranks: Ranks | None = None,
    ) -> None:
        """staging: int32, the runner's: where graphs read a plan's words. ranks: of one of several, which capture together."""
        self.runner = runner
        self._device = runner.device
        self.staging = staging
        scheduler = config.scheduler
        self._words = PinnedRing(self._device, scheduler.max_steps_in_flight + 1, len(staging))
        self.graphs: DecodeGraphs[DecodeGraph] | None = None
        if not config.executor.enforce_eager:
            agree = None if ranks is None else ranks.all_say
            self.graphs = DecodeGraphs(scheduler.max_num_seqs, runner.capture_decode, agree)
        num_host_blocks = config.model.kv.num_blocks(config.cache.swap_bytes)
        self.host_pool = HostPool(self._device, runner.pool, num_host_blocks) if num_host_blocks else None

    def room_for(self, num_words: int) -> PlanBuffer:
        """Return room for so many words; whoever takes one of the pinned buffers may have to wait for its last copy."""
        if num_words > len(self.staging):
            return PlanBuffer(torch.empty(num_words, dtype=torch.int32), None)
        buffer = self._words.take()
        return PlanBuffer(buffer.host, buffer)

    def send(self, room: PlanBuffer, num_words: int) -> torch.Tensor:
        """Copy the words to the device; return where they are, usually the buffer that graphs read."""
        if room._buffer is None:
            return room.host[:num_words].to(self._device.torch_device)
        self.staging[:num_words].copy_(room.host[:num_words], non_blocking=True)
        room._buffer.free_after = self._device.record()
        return self.staging

    def move_blocks(self, packed: PackedPlan, staging: torch.Tensor) -> None:
        """Copy blocks to and from the host, and within the device."""
        if self.host_pool is not None:
            self.host_pool.copy_out(staging[packed.swaps_out])
            self.host_pool.copy_in(staging[packed.swaps_in])
        self.runner.copy_blocks(staging[packed.copies])

    def graph_of(
        self, packed: PackedPlan, staging: torch.Tensor, embeds: StepEmbeds | None
    ) -> DecodeGraph | None:
        """Return the graph that computes a plan, if there is one yet."""
        if not self.could_be_captured(packed, staging, embeds):
            return None
        assert self.graphs is not None
        return self.graphs.find(packed.num_rows)

    def graph_of_size(self, num_rows: int, staging: torch.Tensor) -> DecodeGraph:
        """Return the graph that rank 0 replays; raise `RanksApart` where there is none: other launches would not meet its."""
        graph = None
        if self.graphs is not None and staging is self.staging:
            graph = self.graphs.of_size(num_rows)
        if graph is None:
            raise RanksApart(
                f"rank 0 replays a graph of {num_rows} rows, and this rank has none of that size"
            )
        return graph

    def could_be_captured(self, packed: PackedPlan, staging: torch.Tensor, embeds: StepEmbeds | None) -> bool:
        """Whether there is a graph for such a plan, or there will be."""
        is_decode = packed.num_tokens == packed.num_rows == packed.num_sampled and embeds is None
        return is_decode and self.graphs is not None and staging is self.staging

    def compute(
        self, packed: PackedPlan, staging: torch.Tensor, host: HostRows, embeds: StepEmbeds | None
    ) -> Drawn:
        """Launch a plan's rows kernel by kernel."""
        return self.runner.compute(
            *(staging, packed.num_rows, packed.num_tokens, packed.max_count, packed.num_sampled),
            *(host, embeds),
        )
