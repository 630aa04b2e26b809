"""Blocks of KV whose parts lie in several processes, as rank 0 sees them: whole. Whoever takes them elsewhere knows of no ranks.

    loop        take_into: order to all ──▶ [ rows under way ]
    any thread                                   wait ──▶ all have copied ──▶ rows, whole ──▶ memory; rows are free

The loop waits only where all rows are under way. While it waits steps go on that were begun: whoever computes them needs nothing
of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.distributed.parallel.host_blocks import Moves
from quintet.executor.distributed.parallel.kv_gather import KvGather, PartBlocks, open_crossing, pairs_of
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.kv_transfer.block_bytes import Bytes, Int, Wait
from quintet.executor.model_config.share import Share
from quintet.wire.config import EngineConfig


@dataclass(slots=True, eq=False)
class _Under:
    """Rows under way."""

    number: int
    """Of the order, from 1 on."""
    rows: Int
    arrive: Callable[[], None]
    """What is to be done with them once all ranks have done theirs."""


class BlocksOfAllRanks:
    """See `quintet.executor.kv_transfer.block_bytes.WholeBlocks`."""

    def __init__(self, crossing: KvGather, own: PartBlocks, moves: Moves) -> None:
        """own: rank 0's part."""
        self._ranks, self._parts, self._own, self._moves = crossing.ranks, crossing.parts, own, moves
        ends: list[int] = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._columns = [slice(end - part.shape[1], end) for part, end in zip(self._parts, ends, strict=True)]
        self.block_bytes = ends[-1]
        self._num_rows = len(self._parts[0])
        self._num_told = 0
        self._lock = threading.Lock()
        """Guards all below, and what arrives."""
        self._free = list(range(self._num_rows))
        self._under_way: dict[_Under, None] = {}
        """Begun first, first."""

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        """See `WholeBlocks`."""
        begun = [
            self._take(blocks[at : at + self._num_rows], memory, rows[at : at + self._num_rows])
            for at in range(0, len(blocks), self._num_rows)
        ]

        def wait() -> None:
            for each in begun:
                self._end(each)

        return wait

    def _take(self, blocks: Int, memory: Bytes, into: Int) -> _Under:
        own = self._reserve(len(blocks))

        def arrive() -> None:
            for part, columns in zip(self._parts, self._columns, strict=True):
                memory[into, columns] = part[own]

        return self._tell(OrderKind.CARRY_OUT, blocks, own, arrive)

    def put(self, blocks: Int, taken: Bytes) -> None:
        """See `WholeBlocks`."""
        for at in range(0, len(blocks), self._num_rows):
            some = blocks[at : at + self._num_rows]
            own = self._reserve(len(some))
            for part, columns in zip(self._parts, self._columns, strict=True):
                part[own] = taken[at : at + self._num_rows, columns]
            self._tell(OrderKind.CARRY_IN, some, own, lambda: None)

    def _reserve(self, count: int) -> Int:
        """Take rows that nobody copies to or from any more."""
        while True:
            with self._lock:
                if len(self._free) >= count:
                    taken, self._free = self._free[:count], self._free[count:]
                    return np.array(taken, np.int32)
                first = next(iter(self._under_way))
            self._end(first)

    def _tell(self, kind: OrderKind, blocks: Int, rows: Int, arrive: Callable[[], None]) -> _Under:
        self._num_told += 1
        under = _Under(self._num_told, rows, arrive)
        with self._lock:
            self._under_way[under] = None
        self._moves.move(kind, pairs_of(blocks, rows), lambda pairs: self._own.carry(kind, pairs))
        return under

    def _end(self, under: _Under) -> None:
        """Wait until all ranks have copied; have what arrives read, and the rows used anew, unless that was done."""
        self._ranks.wait_for_done(under.number)
        with self._lock:
            if under in self._under_way:
                under.arrive()
                del self._under_way[under]
                self._free += under.rows.tolist()


def open_whole_blocks(
    config: EngineConfig, crossings: Sequence[int], layers: Sequence[torch.Tensor], share: Share, moves: Moves
) -> BlocksOfAllRanks:
    """Return the blocks of all ranks. crossings: see `Followers`; layers, share: rank 0's."""
    assert len(crossings) == 1, crossings
    crossing = open_crossing(config, crossings[0], 0)
    table = crossing.part_of(share, config.executor.num_kv_memories)
    return BlocksOfAllRanks(crossing, PartBlocks(layers, crossing.ranks, table, share.turn), moves)
