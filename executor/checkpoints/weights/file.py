"""Interface of a checkpoint file (shard) for loaders, independent of its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from quintet.executor.checkpoints.weights.header import Entry


class WeightFile(Protocol):
    """Tensors by name, in a read-only file."""

    path: Path
    size: int
    """In bytes."""
    modified_ns: int
    header: bytes
    """Names, formats and shapes of all tensors: equal bytes mean equal tensors."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Format, shape and place of each tensor."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the fastest order for reading."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, on the host, read-only."""

    def drop(self, name: str) -> None:
        """Release a consumed tensor."""
