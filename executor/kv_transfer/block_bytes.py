"""Blocks of KV memory as bytes: how they leave it, and come back, layer by layer. For a CPU, where memory is memory."""

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
"""Waits until copies are there. From any thread, as often as anybody likes."""


class WholeBlocks(Protocol):
    """The bytes of every block of a model's KV memory, wherever they lie. Used from the executor's loop."""

    @property
    def block_bytes(self) -> int:
        """Of each, whole."""

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        """Copy blocks, as they are now, to these rows of ``memory``, ``[rows, bytes]``."""

    def put(self, blocks: Int, taken: Bytes) -> None:
        """Give blocks the contents ``taken``, ``[blocks, bytes]``, before anything else is computed."""


class BlockBytes:
    """Those of one process's memory. A `WholeBlocks` where nobody else has parts of them."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: KV memory on the CPU, ``[blocks, ...]`` each; of those that have no bytes nothing is copied."""
        self._layers: list[Bytes] = [
            layer.view(torch.uint8).view(len(layer), -1).numpy() for layer in layers if layer.numel()
        ]
        ends: list[int] = [0, *np.cumsum([layer.shape[1] for layer in self._layers]).tolist()]
        self._columns = [slice(begin, end) for begin, end in pairwise(ends)]
        self.block_bytes = ends[-1]

    def take_into(self, blocks: Int, memory: Bytes, rows: Int) -> Wait:
        """See `WholeBlocks`."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            memory[rows, columns] = layer[blocks]
        return _is_there

    def put(self, blocks: Int, taken: Bytes) -> None:
        """See `WholeBlocks`."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            layer[blocks] = taken[:, columns]


def _is_there() -> None:
    """Return: what was copied at once is there."""


def take(whole: WholeBlocks, blocks: Int) -> tuple[Bytes, Wait]:
    """Return copies of blocks, ``[blocks, bytes]``, and what waits for them."""
    taken: Bytes = np.empty((len(blocks), whole.block_bytes), np.uint8)
    return taken, whole.take_into(blocks, taken, np.arange(len(blocks), dtype=np.int32))
