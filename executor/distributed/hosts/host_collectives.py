"""Collectives of ranks on several hosts: each host sends its ranks' contributions to the other hosts.

    host A                                                                          host B
    rank 0 ── rows ──▶ memory ──▶ HostCollectives ── rows, CollectivesDone ──▶ HostCollectives ──▶ memory ──▶ rank 1

Each host has its own memory with the same layout for all ranks' sums. A remote rank counts as arrived at a collective
once its rows are in the local memory. So ranks have the same guarantees as on one host: after a collective, all
contributions are readable, and overwritten rows have been read by all. No rank is two collectives ahead of a host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np

from quintet.executor.distributed.hosts.messages import (
    CHUNK_BYTES,
    CollectiveRows,
    CollectivesDone,
    InvalidMessage,
)
from quintet.executor.distributed.hosts.topology import ranks_of
from quintet.executor.distributed.parallel.library import CLeft, CRanksShape, RanksLibrary, RanksMemory
from quintet.wire.codec import encode
from quintet.wire.config import ExecutorConfig


class HostCollectives:
    """One host's end. A thread waits for the local ranks; the socket loop does the rest."""

    def __init__(
        self,
        library: RanksLibrary,
        descriptor: int,
        shape: CRanksShape,
        executor: ExecutorConfig,
        host: int,
        ring: Callable[[], None],
    ) -> None:
        """descriptor: the ranks' memory. ring: called by the thread when there is something to send."""
        self._library, self._executor, self._host, self._ring = library, executor, host, ring
        self._memory = RanksMemory(library, descriptor, shape)
        self._ranks = [
            library.new(ctypes.byref(shape), self._memory.address, rank, 0)
            for rank in range(executor.num_ranks)
        ]
        self._begin = library.sums(self._ranks[0], 0, shape.sums_width) - self._memory.address
        """Offset of the collectives' rows in the memory."""
        self._num_completed = 0
        """Collectives completed by all local ranks; written by the thread."""
        self._num_sent = 0
        self._num_received = dict.fromkeys(range(executor.num_hosts), 0)
        threading.Thread(target=self._wait, name="collectives", daemon=True).start()

    def _wait(self) -> None:
        own = ranks_of(self._executor, self._host)
        while True:
            self._library.wait_for_arrival(
                self._ranks[own.start], own.start, own.stop, self._num_completed + 1
            )
            self._num_completed += 1
            self._ring()

    def newly_completed(self) -> Iterator[tuple[int, list[bytes | memoryview]]]:
        """Yield destination hosts and frames of new contributions; the frames are valid until the next collective."""
        while self._num_sent < self._num_completed:
            self._num_sent += 1
            contributions = [self._contribution_of(rank) for rank in ranks_of(self._executor, self._host)]
            for other in range(self._executor.num_hosts):
                if other == self._host:
                    continue
                for each in contributions:
                    if other == 0 or not each.for_first:
                        yield from ((other, frames) for frames in self._rows(each, other))
                yield other, [encode(CollectivesDone(self._host, other, self._num_sent))]

    def _contribution_of(self, rank: int) -> CLeft:
        contribution = CLeft()
        self._library.left(self._ranks[rank], self._num_sent, ctypes.byref(contribution))
        return contribution

    def _rows(self, contribution: CLeft, other: int) -> Iterator[list[bytes | memoryview]]:
        """Yield messages with a rank's contribution, in chunks of whole rows."""
        row_bytes, stride = contribution.row_bytes, contribution.stride
        if row_bytes == 0:
            return
        most = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, contribution.rows, most):
            offset = contribution.offset + first * stride
            count = min(most, contribution.rows - first)
            head = encode(CollectiveRows(self._host, other, offset, row_bytes, stride))
            if row_bytes == stride:
                yield [head, memoryview(self._memory.mapped)[offset : offset + count * stride]]
            else:
                yield [head, self._place(offset, count, row_bytes, stride).tobytes()]

    def _place(self, offset: int, rows: int, row_bytes: int, stride: int) -> np.ndarray:
        return np.ndarray((rows, row_bytes), np.uint8, self._memory.mapped, offset, (stride, 1))

    def take_rows(self, message: CollectiveRows, content: memoryview) -> None:
        """Write rows of a remote rank into the local memory. Raises `InvalidMessage`."""
        row_bytes, stride = message.row_bytes, message.stride
        rows = len(content) // row_bytes if row_bytes > 0 else 0
        end = message.offset + (rows - 1) * stride + row_bytes
        if rows < 1 or rows * row_bytes != len(content) or stride < row_bytes:
            raise InvalidMessage("sent rows of an invalid shape")
        if not self._begin <= message.offset < end <= len(self._memory.mapped):
            raise InvalidMessage("sent rows outside of the collectives' memory")
        target = self._place(message.offset, rows, row_bytes, stride)
        target[:] = np.frombuffer(content, np.uint8).reshape(rows, row_bytes)

    def take_done(self, message: CollectivesDone) -> None:
        """Mark the ranks of another host as arrived at a collective. Raises `InvalidMessage`."""
        if message.collectives != self._num_received[message.host] + 1:
            raise InvalidMessage(
                f"reports collective {message.collectives} after {self._num_received[message.host]}"
            )
        self._num_received[message.host] = message.collectives
        for rank in ranks_of(self._executor, message.host):
            self._library.reach_barrier(self._ranks[rank], message.collectives)
