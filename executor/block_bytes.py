"""Blocks of KV memory as bytes: how they leave it, and come back, layer by layer. For a CPU, where memory is memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int = NDArray[np.int32]


class BlockBytes:
    """The bytes of every block of a runner's KV memory."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: KV memory on the CPU, ``[blocks, ...]`` each."""
        self._layers: list[Bytes] = [layer.view(torch.uint8).view(len(layer), -1).numpy() for layer in layers]
        ends: list[int] = np.cumsum([layer.shape[1] for layer in self._layers]).tolist()
        self._columns = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self.block_bytes = ends[-1]

    def take(self, blocks: Int) -> Bytes:
        """Return copies of blocks: ``[blocks, bytes]``."""
        taken: Bytes = np.empty((len(blocks), self.block_bytes), np.uint8)
        self.take_into(blocks, taken, np.arange(len(blocks), dtype=np.int32))
        return taken

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> None:
        """Copy blocks to these rows of ``memory``, ``[rows, bytes]``."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            memory[rows, columns] = layer[blocks]

    def put(self, blocks: Int, taken: Bytes) -> None:
        """Give blocks the contents ``taken``, ``[blocks, bytes]``."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            layer[blocks] = taken[:, columns]
