"""Gather the parts of KV blocks that lie in several processes, in memory shared by all ranks of all stages.

    | part of stage 0, memory 0 | part of stage 0, memory 1 | part of stage 1, memory 0 | …     rows 0, 1, …
                │                           │                           │
          its rank copies             its rank copies             its rank copies

Each part has a table, ``[rows, bytes]``. The leader assigns blocks to rows by an order in sequence with all others.
The order follows the step that wrote the block and precedes any step that may overwrite it. Transfers are
asynchronous: each rank counts its finished orders, and the leader waits for these counts before it reads or reuses
rows (`quintet.executor.distributed.parallel.whole_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.shapes import gather_rows, gather_shape, part_bytes
from quintet.executor.kv_transfer.block_bytes import BlockBytes, Bytes, Int
from quintet.executor.model_config.share import BlockStripe, Share
from quintet.wire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class KvGather:
    """One rank's view of the gather memory."""

    ranks: Ranks
    parts: list[Bytes]
    """``[rows, bytes]`` of each part, in the order of a whole block."""

    def part_of(self, share: Share, num_memories: int) -> Bytes:
        """Return the table of a rank's part. num_memories: KV memories per stage."""
        return self.parts[share.stage * num_memories + share.kv_copy]


def open_gather(config: EngineConfig, descriptor: int, rank: int) -> KvGather:
    """Return the view of a rank, numbered over all stages. descriptor: of the memory, initially zero."""
    ranks = Ranks(descriptor, Share(rank, config.executor.num_ranks), gather_shape(config), spins=0)
    memory, num_rows = ranks.staging().numpy(), gather_rows(config)
    widths = np.repeat(part_bytes(config), config.executor.num_kv_memories)
    ends = (num_rows * np.cumsum(widths)).tolist()
    tables = (memory[end - num_rows * width : end] for end, width in zip(ends, widths, strict=True))
    return KvGather(ranks, [table.reshape(num_rows, -1) for table in tables])


class PartBlocks:
    """One rank's part of every block, and its gather table."""

    def __init__(
        self, layers: Sequence[torch.Tensor], ranks: Ranks, table: Bytes, stripe: BlockStripe
    ) -> None:
        """layers: KV memory. stripe: this rank's stripe of rows, if several ranks share the KV memory."""
        self._blocks, self._ranks, self._table, self._turn = BlockBytes(layers), ranks, table, stripe
        assert self._blocks.block_bytes == table.shape[1], (self._blocks.block_bytes, table.shape)
        self._num_carried = 0

    def carry(self, kind: OrderKind, pairs: bytes) -> None:
        """Copy blocks to rows, or back. pairs: int32 pairs of block and row."""
        columns = np.frombuffer(pairs, np.int32).reshape(-1, 2)
        blocks, rows = columns[columns[:, 1] % self._turn.size == self._turn.index].T
        if kind is OrderKind.CARRY_OUT:
            self._blocks.take_into(blocks, self._table, rows)
        else:
            self._blocks.put(blocks, self._table[rows])

    def done(self) -> None:
        """Report the order as finished."""
        self._num_carried += 1
        self._ranks.done_with(self._num_carried)


def open_parts(
    config: EngineConfig, descriptor: int, rank: int, layers: Sequence[torch.Tensor], share: Share
) -> PartBlocks:
    """Return a follower's part of the blocks."""
    gather = open_gather(config, descriptor, rank)
    table = gather.part_of(share, config.executor.num_kv_memories)
    return PartBlocks(layers, gather.ranks, table, share.stripe)


def pairs_of(blocks: Int, rows: Int) -> bytes:
    """Encode a transfer order: int32 pairs of block and row."""
    return np.stack((blocks, rows), 1).astype(np.int32).tobytes()
