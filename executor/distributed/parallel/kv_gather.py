"""Where blocks of KV come together whose parts lie in several processes: memory that all ranks of all stages see.

    | part of stage 0, memory 0 | part of stage 0, memory 1 | part of stage 1, memory 0 | …     of row 0, of row 1, …
                │                           │                           │
          its rank copies             its rank copies             its rank copies

Each part lies in a table of its own, ``[rows, bytes]``. Rank 0 says which block goes to which row, or comes from there, by an
order among all others: behind the step that wrote the block, before any that could write over it. Nobody waits for that: each
rank says how many such orders it has carried out, and rank 0 looks before it reads the rows, or uses them anew
(`quintet.executor.distributed.parallel.whole_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.shapes import crossing_rows, crossing_shape, part_bytes
from quintet.executor.kv_transfer.block_bytes import BlockBytes, Bytes, Int
from quintet.executor.model_config.share import BlockStripe, Share
from quintet.wire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class KvGather:
    """The memory, as one rank sees it."""

    ranks: Ranks
    parts: list[Bytes]
    """``[rows, bytes]`` of each part, in the order in which they are a block."""

    def part_of(self, share: Share, num_memories: int) -> Bytes:
        """Return the table of a rank's part. num_memories: of each stage's ranks."""
        return self.parts[share.stage * num_memories + share.kv_copy]


def open_crossing(config: EngineConfig, descriptor: int, rank: int) -> KvGather:
    """Return the view of a rank of all stages'. descriptor: of the memory; what it holds begins with zeros."""
    ranks = Ranks(descriptor, Share(rank, config.executor.num_ranks), crossing_shape(config), spins=0)
    memory, num_rows = ranks.staging().numpy(), crossing_rows(config)
    widths = np.repeat(part_bytes(config), config.executor.num_kv_memories)
    ends = (num_rows * np.cumsum(widths)).tolist()
    tables = (memory[end - num_rows * width : end] for end, width in zip(ends, widths, strict=True))
    return KvGather(ranks, [table.reshape(num_rows, -1) for table in tables])


class PartBlocks:
    """One rank's part of every block, and the table that it goes through."""

    def __init__(self, layers: Sequence[torch.Tensor], ranks: Ranks, table: Bytes, turn: BlockStripe) -> None:
        """layers: KV memory. turn: of ranks that keep it together, which rows this one copies."""
        self._blocks, self._ranks, self._table, self._turn = BlockBytes(layers), ranks, table, turn
        assert self._blocks.block_bytes == table.shape[1], (self._blocks.block_bytes, table.shape)
        self._num_carried = 0

    def carry(self, kind: OrderKind, pairs: bytes) -> None:
        """Copy blocks to rows, or back: int32 pairs of them."""
        columns = np.frombuffer(pairs, np.int32).reshape(-1, 2)
        blocks, rows = columns[columns[:, 1] % self._turn.size == self._turn.index].T
        if kind is OrderKind.CARRY_OUT:
            self._blocks.take_into(blocks, self._table, rows)
        else:
            self._blocks.put(blocks, self._table[rows])

    def done(self) -> None:
        """Say that the order was carried out, by all ranks that keep the memory together."""
        self._num_carried += 1
        self._ranks.done_with(self._num_carried)


def open_parts(
    config: EngineConfig, descriptor: int, rank: int, layers: Sequence[torch.Tensor], share: Share
) -> PartBlocks:
    """Return the part of a rank that is told what to carry."""
    crossing = open_crossing(config, descriptor, rank)
    table = crossing.part_of(share, config.executor.num_kv_memories)
    return PartBlocks(layers, crossing.ranks, table, share.turn)


def pairs_of(blocks: Int, rows: Int) -> bytes:
    """Return what an order to carry says."""
    return np.stack((blocks, rows), 1).astype(np.int32).tobytes()
