"""Interface of a checkpoint file for loaders (`WeightFile`), and a mapped safetensors file.

Its tensors are views without a copy. `quintet.executor.checkpoints.weights.header` validates it.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from quintet.executor.checkpoints.weights.header import Entry, read_header, readable

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Tensors(Protocol):
    """Tensors by name, to be read one by one."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Format, shape and place of each tensor."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, on the host, read-only."""

    def drop(self, name: str) -> None:
        """Release a consumed tensor."""


class WeightFile(Tensors, Protocol):
    """A checkpoint file (shard) of any format, read-only."""

    path: Path
    size: int
    """In bytes."""
    modified_ns: int
    header: bytes
    """Names, formats and shapes of all tensors: equal bytes mean equal tensors."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the fastest order for reading."""


class MappedFile:
    """A mapped file. Views keep the map alive; its pages belong to the page cache."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header. Raises `ConfigError`."""
        self.path = path
        with readable(path), path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.size, self.modified_ns = status.st_size, status.st_mtime_ns
            header = read_header(path, file, self.size)
            self.header, self.entries = header.raw, header.entries
            self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in file order."""
        return iter(sorted(self.entries, key=lambda name: self.entries[name].begin))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of the tensor; a copy if it is misaligned for its number format."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:
            raw = bytearray(self._map[entry.begin : entry.begin + entry.num_bytes])
            return torch.frombuffer(raw, dtype=dtype).view(entry.shape)
        count = entry.num_bytes // dtype.itemsize
        return read_only_tensor(self._map, dtype, count, entry.begin).view(entry.shape)

    def drop(self, name: str) -> None:
        """Release the pages of a consumed tensor; a kept view reads them again."""
        entry = self.entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (entry.begin + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def read_only_tensor(mapped: mmap.mmap, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """Return a view of mapped memory and keep it alive. A write to it crashes the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # intended
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
