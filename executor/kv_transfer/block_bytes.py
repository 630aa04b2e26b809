"""Blocks of KV memory as bytes: copy them out and in, layer by layer, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int = NDArray[np.int32]
Wait = Callable[[], None]
"""Waits until copies are complete. Any thread may call it, more than once."""


class WholeBlocks(Protocol):
    """The bytes of a model's KV blocks, in one or several processes. Used by the executor's loop."""

    block_bytes: int
    """Size of a whole block."""

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        """Copy the current content of blocks to these rows of ``memory``, ``[rows, bytes]``."""

    def put(self, blocks: Int, taken: Bytes) -> None:
        """Set the contents of blocks from ``taken``, ``[blocks, bytes]``, before the next computation."""


class BlockBytes(WholeBlocks):
    """The blocks of one process that does not share them with other ranks."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: KV memory on the CPU, ``[blocks, ...]`` each; empty layers are skipped."""
        self._layers: list[Bytes] = [
            layer.view(torch.uint8).view(len(layer), -1).numpy() for layer in layers if layer.numel()
        ]
        ends: list[int] = [0, *np.cumsum([layer.shape[1] for layer in self._layers]).tolist()]
        self._columns = [slice(begin, end) for begin, end in pairwise(ends)]
        self.block_bytes = ends[-1]

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        for layer, columns in zip(self._layers, self._columns, strict=True):
            memory[rows, columns] = layer[blocks]
        return lambda: None

    def put(self, blocks: Int, taken: Bytes) -> None:
        for layer, columns in zip(self._layers, self._columns, strict=True):
            layer[blocks] = taken[:, columns]
