"""Checkpoint files pickled by torch (``pytorch_model.bin``), the only form of some older families.

A pickle can execute code. Only torch's weights-only reader opens such files; it restricts them to tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from quintet.executor.checkpoints.weights.header import Entry, readable
from quintet.executor.checkpoints.weights.mapped import DTYPES
from quintet.wire.errors import ConfigError

_FORMATS = {dtype: name for name, dtype in DTYPES.items()}

_COUNTS = "sparse_threshold."
"""Prefix of SqueezeLLM's outlier counts, which the tensor shapes repeat."""


class PickledFile:
    """A `quintet.executor.checkpoints.weights.mapped.WeightFile`. Tensors are views of the mapped file if torch can map
    it."""

    def __init__(self, path: Path) -> None:
        """Load the tensors' metadata. Raises `ConfigError`."""
        self.path = path
        with readable(path):
            status = os.stat(path)
            self._tensors = _read(path)
        self.size, self.modified_ns = status.st_size, status.st_mtime_ns
        self.entries = {
            name: Entry(_FORMATS[tensor.dtype], tuple(tensor.shape), 0, tensor.numel() * tensor.itemsize)
            for name, tensor in self._tensors.items()
        }
        described = {name: [entry.dtype, entry.shape] for name, entry in self.entries.items()}
        self.header = json.dumps(described, sort_keys=True).encode()

    def __iter__(self) -> Iterator[str]:
        """Yield the names in file order."""
        return iter(list(self._tensors))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor."""
        return self._tensors[name]

    def drop(self, name: str) -> None:
        """Release the tensor; frees its memory if the file is not mapped and no tensor shares it."""
        self._tensors.pop(name)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return the file's tensors by name."""
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            loaded = torch.load(
                path, map_location="cpu", weights_only=True
            )  # before torch 1.6: not a zip file
    except OSError:
        raise
    except Exception as error:  # invalid files raise many exception types
        if "torchao." in str(error):
            raise ConfigError(
                f"{path}: torchao's pickled tensor classes are not supported; save the model again as safetensors"
                " with torchao 0.15 or later"
            ) from error
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path}: torch's weights-only reader rejects it ({first:.200}); download it again"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise ConfigError(f"{path}: is not a dictionary of tensors; it is not a model checkpoint")
    loaded = {name: each for name, each in loaded.items() if not name.startswith(_COUNTS)}
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _FORMATS:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(f"{path}: the entry {name!r:.80} of type {kind} is not a supported tensor")
    return dict(loaded)
