"""Device side of a step: copies the packed words, moves blocks, and computes the rows eagerly or by a graph.

Works on packed plans only, so every rank runs the same code with the words of rank 0.

`PinnedRing` has the pinned buffers for asynchronous copies between host and device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.device import Device, Event
from quintet.executor.backends.cuda.graphs import DecodeGraphs, GraphSize, graph_sizes
from quintet.executor.backends.cuda.kv_memory import HostPool
from quintet.executor.backends.cuda.ops.collectives import RankDesyncError
from quintet.executor.backends.cuda.ops.tables import PackedPlan, Words
from quintet.executor.backends.cuda.runner import DecodeGraph, DeviceRunner, Drawn
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.embeds import StepEmbeds
from quintet.wire.config import EngineConfig


@dataclass(slots=True)
class PinnedBuffer:
    """Host memory, normally pinned, and the event after the last copy that used it."""

    host: torch.Tensor
    free_after: Event | None = None

    @property
    def words(self) -> Words:
        """``host`` as a numpy array."""
        words: Words = self.host.numpy()
        return words


class PinnedRing:
    """Pinned buffers of one size, reused in turn.

    `take` waits until the device has finished the last use of the buffer. With one more buffer than steps in flight it does not
    wait.
    """

    def __init__(self, device: Device, num_buffers: int, num_words: int) -> None:
        self._buffers = itertools.cycle(
            [PinnedBuffer(device.pinned((num_words,), torch.int32)) for _ in range(num_buffers)]
        )

    def take(self) -> PinnedBuffer:
        """Return the least recently used buffer; the caller sets ``free_after``."""
        buffer = next(self._buffers)
        if buffer.free_after is not None:
            buffer.free_after.wait()
            buffer.free_after = None
        return buffer


class DeviceSteps:
    """Launches of packed plans, in order."""

    def __init__(self, runner: DeviceRunner, config: EngineConfig, ranks: Ranks | None = None) -> None:
        """ranks: given if several ranks capture together."""
        self.runner, self._device, self.staging = runner, runner.device, runner.staging
        scheduler = config.scheduler
        self._words = PinnedRing(self._device, scheduler.max_steps_in_flight + 1, len(self.staging))
        self.graphs: DecodeGraphs[DecodeGraph] | None = None
        if not config.executor.enforce_eager:
            agree = None if ranks is None else ranks.all_agree
            self.graphs = DecodeGraphs(graph_sizes(scheduler, runner.max_draws), runner.capture_decode, agree)
        self.num_without_graph = 0
        """Steps that ran eagerly for lack of a graph; the worker resets it."""
        num_host_blocks = config.model.kv.num_offloaded_blocks(config.cache.swap_bytes)
        self.host_pool = HostPool(self._device, runner.pool, num_host_blocks) if num_host_blocks else None

    @property
    def num_missing_graphs(self) -> int:
        """Number of graphs left to capture."""
        return 0 if self.graphs is None else self.graphs.num_missing

    def capture_one(self) -> None:
        """Capture the next graph."""
        assert self.graphs is not None, "steps run eagerly"
        self.graphs.capture_one()

    def buffer_for(self, num_words: int) -> PinnedBuffer:
        """Return a buffer for ``num_words``; may wait for the last copy from it.

        A plan that exceeds ``staging`` is too rare to reserve pinned memory for.
        """
        if num_words > len(self.staging):
            return PinnedBuffer(torch.empty(num_words, dtype=torch.int32))
        return self._words.take()

    def send(self, buffer: PinnedBuffer, num_words: int) -> torch.Tensor:
        """Copy the words to the device; return the device tensor, normally ``staging``."""
        if len(buffer.host) > len(self.staging):
            return buffer.host[:num_words].to(self._device.torch_device)
        self.staging[:num_words].copy_(buffer.host[:num_words], non_blocking=True)
        buffer.free_after = self._device.record()
        return self.staging

    def move_blocks(self, packed: PackedPlan, staging: torch.Tensor) -> None:
        """Copy blocks to the host, from the host, and within the device."""
        if self.host_pool is not None:
            self.host_pool.copy_out(staging[packed.swaps_out])
            self.host_pool.copy_in(staging[packed.swaps_in])
        self.runner.copy_blocks(staging[packed.copies])

    def graph_of(
        self, packed: PackedPlan, staging: torch.Tensor, embeds: StepEmbeds | None
    ) -> DecodeGraph | None:
        """Return the captured graph for a plan, or None."""
        if not self.is_graph_shape(packed, staging, embeds):
            return None
        assert self.graphs is not None
        return self.graphs.find(GraphSize(packed.num_tokens, packed.max_count))

    def graph_of_size(self, size: GraphSize, staging: torch.Tensor) -> DecodeGraph:
        """Return the graph that rank 0 replays; raise `RankDesyncError` if it is missing: eager launches would not match."""
        graph = None
        if self.graphs is not None and staging is self.staging:
            graph = self.graphs.of_size(size)
        if graph is None:
            raise RankDesyncError(
                f"rank 0 replays a graph of {size.num_tokens} tokens, up to {size.max_count} a row; this rank has no such graph"
            )
        return graph

    def is_graph_shape(self, packed: PackedPlan, staging: torch.Tensor, embeds: StepEmbeds | None) -> bool:
        """Return whether the plan is a decode step for which a graph exists or will be captured."""
        if self.graphs is None or staging is not self.staging or embeds is not None:
            return False
        size = GraphSize(packed.num_tokens, packed.max_count)
        return packed.num_tokens == packed.num_sampled and self.graphs.has_size(size)

    def compute(
        self, packed: PackedPlan, staging: torch.Tensor, host: HostRows | None, embeds: StepEmbeds | None
    ) -> Drawn:
        """Launch a plan's rows eagerly. host: as in `DeviceRunner.compute`."""
        self.num_without_graph += self.is_graph_shape(packed, staging, embeds)
        return self.runner.compute(
            *(staging, packed.num_rows, packed.num_tokens, packed.max_count, packed.num_sampled),
            *(host, embeds),
        )
