"""A file of a checkpoint, whatever its format, as a loader sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from quintet.executor.checkpoints.weights.header import Entry


class WeightFile(Protocol):
    """Tensors by name, in a file that is never written to."""

    path: Path
    size: int
    """In bytes."""
    modified_ns: int
    header: bytes
    """Names, formats and shapes of all tensors: equal bytes, equal meaning."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What is known of each tensor before it is read."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order in which they are read fastest."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, on the host, not to be written to."""

    def drop(self, name: str) -> None:
        """Say that a tensor was consumed."""
