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

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.shapes import gather_rows, gather_shape, part_bytes
from quintet.executor.kv_transfer.block_bytes import BlockBytes, Bytes, Int
from quintet.executor.model_config.share import Share
from quintet.wire.config import EngineConfig

OwnMoves = dict[OrderKind, Callable[[bytes], None]]
"""One rank's part of each order that moves blocks; the argument is the order's int32 pairs."""


class PartBlocks:
    """One rank's part of every block, and its view of the gather memory."""

    def __init__(
        self, config: EngineConfig, descriptor: int, rank: int, layers: Sequence[torch.Tensor], share: Share
    ) -> None:
        """descriptor: of the memory, initially zero. rank: number over all stages. layers: KV memory."""
        num_memories, num_rows = config.executor.num_kv_memories, gather_rows(config)
        self.ranks = Ranks(descriptor, Share(rank, config.executor.num_ranks), gather_shape(config), spins=0)
        memory, widths = self.ranks.staging().numpy(), np.repeat(part_bytes(config), num_memories)
        ends = (num_rows * np.cumsum(widths)).tolist()
        self.tables: list[Bytes] = [
            memory[end - num_rows * width : end].reshape(num_rows, -1)
            for end, width in zip(ends, widths, strict=True)
        ]
        """``[rows, bytes]`` of each part, in the order of a whole block."""
        self._table = self.tables[share.stage * num_memories + share.kv_copy]
        self._blocks, self._turn = BlockBytes(layers), share.stripe
        assert self._blocks.block_bytes == self._table.shape[1], (self._blocks.block_bytes, self._table.shape)
        self._num_done = 0

    @property
    def moves(self) -> OwnMoves:
        """This rank's part of the transfers; reported as finished when it returns."""
        return {OrderKind.CARRY_OUT: self._take, OrderKind.CARRY_IN: self._put}

    def _take(self, pairs: bytes) -> None:
        blocks, rows = self._own(pairs)
        self._blocks.take_into(blocks, self._table, rows)
        self._report_done()

    def _put(self, pairs: bytes) -> None:
        blocks, rows = self._own(pairs)
        self._blocks.put(blocks, self._table[rows])
        self._report_done()

    def _own(self, pairs: bytes) -> Int:
        """Return the blocks and rows, ``[2, pairs]``, of this rank's stripe."""
        columns = np.frombuffer(pairs, np.int32).reshape(-1, 2)
        own: Int = columns[columns[:, 1] % self._turn.size == self._turn.index].T
        return own

    def _report_done(self) -> None:
        self._num_done += 1
        self.ranks.done_with(self._num_done)
