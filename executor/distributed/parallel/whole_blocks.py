"""Whole KV blocks with parts in several processes. KV transfer uses them without regard to ranks.

The parts are gathered in memory shared by all ranks of all stages:

    | part of stage 0, memory 0 | part of stage 0, memory 1 | part of stage 1, memory 0 | …     rows 0, 1, …
                │                           │                           │
          its rank copies             its rank copies             its rank copies

Each part has a table, ``[rows, bytes]``. The leader assigns blocks to rows by an order in sequence with all others.
The order follows the step that wrote the block and precedes any step that may overwrite it. Transfers are
asynchronous: each rank counts its finished orders, and the leader waits for these counts before it reads or reuses
rows.

    loop        take_into: order to all ──▶ [ rows in flight ]
    any thread                                   wait ──▶ all ranks have copied ──▶ whole rows ──▶ memory; rows free

The loop blocks only if all rows are in flight; started steps continue meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.library import PAIR_BYTES, OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.shapes import gather_rows, gather_shape, part_bytes
from quintet.executor.kv_memory import KvMemory
from quintet.executor.kv_transfer.block_bytes import BlockBytes, Bytes, Int, Wait, WholeBlocks
from quintet.executor.kv_transfer.connector import KvConnector
from quintet.executor.kv_transfer.host_blocks import HostBlocks
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


def own_moves(kv: KvMemory, host_blocks: HostBlocks, parts: PartBlocks | None = None) -> OwnMoves:
    """Return a rank's part of all moves: copies, swaps, and transfers if there are any."""
    own: OwnMoves = {
        OrderKind.COPY_BLOCKS: kv.copy,
        OrderKind.SWAP_OUT: host_blocks.copy_out,
        OrderKind.SWAP_IN: host_blocks.copy_in,
    }
    return own if parts is None else own | parts.moves


class Moves:
    """Moves blocks on all ranks at the same time: on this stage and on the following ones."""

    def __init__(self, own: OwnMoves, ranks: Ranks | None, following: Ranks | None = None) -> None:
        """ranks: of this stage, if there are several; following: the link to the next stage."""
        self.own, self._ranks, self._following = own, ranks, following

    def move(self, kind: OrderKind, pairs: bytes) -> None:
        """Send the order to the other ranks, and execute it on this rank."""
        if self._following is not None:
            self._following.send_items(kind, pairs, PAIR_BYTES)
        if self._ranks is None:
            self.own[kind](pairs)
        else:
            self._ranks.move_blocks(kind, pairs, self.own[kind])


@dataclass(slots=True, eq=False)
class _Transfer:
    """Rows in flight."""

    number: int
    """Number of the order, from 1."""
    rows: Int
    complete: Callable[[], None]
    """Completion, called after all ranks have copied."""


class BlocksOfAllRanks(WholeBlocks):
    """The blocks of several ranks, as the leader sees them."""

    def __init__(
        self,
        config: EngineConfig,
        gather_fds: Sequence[int],
        layers: Sequence[torch.Tensor],
        share: Share,
        moves: Moves,
    ) -> None:
        """gather_fds: see `FollowerProcesses`; layers, share: the leader's."""
        (descriptor,) = gather_fds
        own = PartBlocks(config, descriptor, 0, layers, share)
        self._ranks, self._parts, self._moves = own.ranks, own.tables, moves
        moves.own |= own.moves
        ends: list[int] = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._columns = [slice(end - part.shape[1], end) for part, end in zip(self._parts, ends, strict=True)]
        self.block_bytes = ends[-1]
        self._num_rows = len(self._parts[0])
        self._num_sent = 0
        self._lock = threading.Lock()
        """Guards the fields below, and completions."""
        self._free = list(range(self._num_rows))
        self._in_flight: dict[_Transfer, None] = {}
        """Transfers in flight, oldest first."""

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        started = [
            self._take(blocks[at : at + self._num_rows], memory, rows[at : at + self._num_rows])
            for at in range(0, len(blocks), self._num_rows)
        ]

        def wait() -> None:
            for each in started:
                self._end(each)

        return wait

    def _take(self, blocks: Int, memory: Bytes, into: Int) -> _Transfer:
        own = self._reserve(len(blocks))

        def complete() -> None:
            for part, columns in zip(self._parts, self._columns, strict=True):
                memory[into, columns] = part[own]

        return self._send(OrderKind.CARRY_OUT, blocks, own, complete)

    def put(self, blocks: Int, contents: Bytes) -> None:
        for at in range(0, len(blocks), self._num_rows):
            some = blocks[at : at + self._num_rows]
            own = self._reserve(len(some))
            for part, columns in zip(self._parts, self._columns, strict=True):
                part[own] = contents[at : at + self._num_rows, columns]
            self._send(OrderKind.CARRY_IN, some, own, lambda: None)

    def _reserve(self, count: int) -> Int:
        """Take rows without a transfer in flight, waiting for the oldest one if needed."""
        while True:
            with self._lock:
                if len(self._free) >= count:
                    contents, self._free = self._free[:count], self._free[count:]
                    return np.array(contents, np.int32)
                first = next(iter(self._in_flight))
            self._end(first)

    def _send(self, kind: OrderKind, blocks: Int, rows: Int, complete: Callable[[], None]) -> _Transfer:
        self._num_sent += 1
        transfer = _Transfer(self._num_sent, rows, complete)
        with self._lock:
            self._in_flight[transfer] = None
        self._moves.move(kind, np.stack((blocks, rows), 1).astype(np.int32).tobytes())
        return transfer

    def _end(self, transfer: _Transfer) -> None:
        """Wait until all ranks have copied; then complete the transfer and free its rows, unless already done."""
        self._ranks.wait_for_done(transfer.number)
        with self._lock:
            if transfer in self._in_flight:
                transfer.complete()
                del self._in_flight[transfer]
                self._free += transfer.rows.tolist()


def open_block_moves(
    context: WorkerContext, runner_name: str, following: Ranks | None
) -> tuple[Moves, HostBlocks, KvConnector]:
    """Return the moves of blocks on all ranks, the host memory of swaps, and the KV back ends of a worker.

    following: the link to the next stage, if there are several.
    """
    assert context.kv is not None
    config, ranks, share, layers = context.config, context.ranks, context.share, context.kv.blocks
    num_host_blocks = config.model.kv.num_offloaded_blocks(config.cache.swap_bytes)
    host_blocks = HostBlocks(layers, num_host_blocks, share.stripe)
    moves = Moves(own_moves(context.kv, host_blocks), ranks, following)
    blocks: Callable[[], WholeBlocks] = partial(BlockBytes, layers)
    if ranks is not None or following is not None:
        blocks = partial(BlocksOfAllRanks, config, context.memory.gather, layers, share, moves)
    swap_in = partial(moves.move, OrderKind.SWAP_IN)
    return moves, host_blocks, KvConnector(blocks, config, runner_name, num_host_blocks, swap_in)
