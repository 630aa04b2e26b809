"""The blocks that this server offers to peers: copies in host memory by key, with LRU eviction."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, WholeBlocks
from quintet.executor.memory import lazy_zeros


class OfferedBlocks:
    """Used by the executor's loop, which copies blocks in, and by the serving thread."""

    def __init__(self, blocks: WholeBlocks, num_rows: int) -> None:
        self._blocks = blocks
        shape = (num_rows, blocks.block_bytes)
        self._memory: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._lock = threading.Lock()
        """Guards the fields below and the memory."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[bytes, int] = {}
        """Rows by key, least recently used first."""

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self._blocks.block_bytes

    def put(self, keys: Sequence[bytes], blocks: Int) -> None:
        """Copy blocks of KV memory that are not offered yet; if they exceed the capacity, the first ones."""
        with self._lock:
            new, rows = list[int](), list[int]()
            num_rows = len(self._memory)
            for index in range(
                min(len(keys), num_rows) - 1, -1, -1
            ):  # the first blocks become the most recent
                key = keys[index]
                row = self._row_of.pop(key, None)
                if row is None:
                    row = self._take_row()
                    new.append(index)
                    rows.append(row)
                self._row_of[key] = row
            if new:
                wait = self._blocks.take_into(blocks[new], self._memory, np.array(rows, np.int32))
                wait()  # so the serving thread reads complete blocks

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        return self._row_of.pop(next(iter(self._row_of)))

    def get(self, key: bytes) -> bytes | None:
        """Return the block of this key, or None."""
        with self._lock:
            row = self._row_of.pop(key, None)
            if row is None:
                return None
            self._row_of[key] = row
            return bytes(self._memory[row].data)
