"""Whole KV blocks with parts in several processes, as the leader sees them. KV transfer uses them without regard to ranks.

    loop        take_into: order to all ──▶ [ rows in flight ]
    any thread                                   wait ──▶ all ranks have copied ──▶ whole rows ──▶ memory; rows are
    free

The loop blocks only if all rows are in flight; started steps continue meanwhile.
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
    """Rows in flight."""

    number: int
    """Number of the order, from 1."""
    rows: Int
    arrive: Callable[[], None]
    """Completion, called after all ranks have copied."""


class BlocksOfAllRanks:
    """See `quintet.executor.kv_transfer.block_bytes.WholeBlocks`."""

    def __init__(self, crossing: KvGather, own: PartBlocks, moves: Moves) -> None:
        """own: the leader's part."""
        self._ranks, self._parts, self._own, self._moves = crossing.ranks, crossing.parts, own, moves
        ends: list[int] = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._columns = [slice(end - part.shape[1], end) for part, end in zip(self._parts, ends, strict=True)]
        self.block_bytes = ends[-1]
        self._num_rows = len(self._parts[0])
        self._num_sent = 0
        self._lock = threading.Lock()
        """Guards the fields below, and completions."""
        self._free = list(range(self._num_rows))
        self._under_way: dict[_Under, None] = {}
        """Transfers in flight, oldest first."""

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        """See `WholeBlocks`."""
        started = [
            self._take(blocks[at : at + self._num_rows], memory, rows[at : at + self._num_rows])
            for at in range(0, len(blocks), self._num_rows)
        ]

        def wait() -> None:
            for each in started:
                self._end(each)

        return wait

    def _take(self, blocks: Int, memory: Bytes, into: Int) -> _Under:
        own = self._reserve(len(blocks))

        def arrive() -> None:
            for part, columns in zip(self._parts, self._columns, strict=True):
                memory[into, columns] = part[own]

        return self._send(OrderKind.CARRY_OUT, blocks, own, arrive)

    def put(self, blocks: Int, taken: Bytes) -> None:
        """See `WholeBlocks`."""
        for at in range(0, len(blocks), self._num_rows):
            some = blocks[at : at + self._num_rows]
            own = self._reserve(len(some))
            for part, columns in zip(self._parts, self._columns, strict=True):
                part[own] = taken[at : at + self._num_rows, columns]
            self._send(OrderKind.CARRY_IN, some, own, lambda: None)

    def _reserve(self, count: int) -> Int:
        """Take rows without a transfer in flight, waiting for the oldest one if needed."""
        while True:
            with self._lock:
                if len(self._free) >= count:
                    taken, self._free = self._free[:count], self._free[count:]
                    return np.array(taken, np.int32)
                first = next(iter(self._under_way))
            self._end(first)

    def _send(self, kind: OrderKind, blocks: Int, rows: Int, arrive: Callable[[], None]) -> _Under:
        self._num_sent += 1
        under = _Under(self._num_sent, rows, arrive)
        with self._lock:
            self._under_way[under] = None
        self._moves.move(kind, pairs_of(blocks, rows), lambda pairs: self._own.carry(kind, pairs))
        return under

    def _end(self, under: _Under) -> None:
        """Wait until all ranks have copied; then complete the transfer and free its rows, unless already done."""
        self._ranks.wait_for_done(under.number)
        with self._lock:
            if under in self._under_way:
                under.arrive()
                del self._under_way[under]
                self._free += under.rows.tolist()


def open_whole_blocks(
    config: EngineConfig, crossings: Sequence[int], layers: Sequence[torch.Tensor], share: Share, moves: Moves
) -> BlocksOfAllRanks:
    """Return the blocks of all ranks. crossings: see `FollowerProcesses`; layers, share: the leader's."""
    assert len(crossings) == 1, crossings
    crossing = open_crossing(config, crossings[0], 0)
    table = crossing.part_of(share, config.executor.num_kv_memories)
    return BlocksOfAllRanks(crossing, PartBlocks(layers, crossing.ranks, table, share.turn), moves)
