"""A safetensors file, mapped: tensors are views of it, without a copy.

The header is read here rather than by the safetensors package, which copies each tensor. Nothing in it is believed: every
offset, shape and number format is checked against the file's size before a view is made. Format: the README of
huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from quintet.wire.errors import ConfigError

MAX_HEADER_BYTES = 100 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Byte of the file."""
    num_bytes: int


class MappedFile:
    """One file. Views keep the map alive; the pages behind them are the page cache's."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header. Raises `ConfigError` of one line."""
        self.path = path
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size, self.modified_ns = status.st_size, status.st_mtime_ns
                self.header = _read_header(file, self.size)
                self.entries = _entries(self.header, self.size)
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ConfigError(f"{path}: is missing; download it again") from None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path}: not a readable safetensors file ({error}); download it again"
            ) from error

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order in which they lie in the file."""
        return iter(sorted(self.entries, key=lambda name: self.entries[name].begin))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of the tensor; a copy where it is not aligned to its number format."""
        entry = self.entries[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.begin % entry.dtype.itemsize:
            raw = bytearray(self._map[entry.begin : entry.begin + entry.num_bytes])
            return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)
        count = entry.num_bytes // entry.dtype.itemsize
        return read_only_tensor(self._map, entry.dtype, count, entry.begin).view(entry.shape)

    def drop(self, name: str) -> None:
        """Let the kernel take back the pages of a tensor that was consumed; a view that was kept reads them again."""
        entry = self.entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (entry.begin + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def read_only_tensor(mapped: mmap.mmap, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """Return a view of mapped memory, which it keeps alive. Whoever writes to it ends the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # meant to be so
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def _read_header(file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"it has {size} bytes, not even a header")
    (num_bytes,) = struct.unpack("<Q", prefix)
    if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header claims {num_bytes} bytes of {size}")
    return file.read(num_bytes)


def _entries(header: bytes, size: int) -> dict[str, Entry]:
    parsed = json.loads(header)
    if not isinstance(parsed, dict):
        raise ValueError("its header is not a JSON object")
    begin = 8 + len(header)
    return {
        name: _entry(name, value, begin, size) for name, value in parsed.items() if name != "__metadata__"
    }


def _entry(name: str, value: object, data_begin: int, size: int) -> Entry:
    if not isinstance(value, dict):
        raise ValueError(f"tensor {name!r} is described by {value!r:.80}")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise ValueError(f"tensor {name!r} has the number format {value.get('dtype')!r:.80}")
    shape = _whole_numbers(name, "shape", value.get("shape"))
    offsets = _whole_numbers(name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_begin:
        raise ValueError(
            f"tensor {name!r} lies at {list(offsets)} of {size - data_begin} bytes; the file may be cut off"
        )
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} takes {num_bytes} bytes")
    return Entry(dtype, shape, data_begin + offsets[0], num_bytes)


def _whole_numbers(name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"tensor {name!r} has {key} {value!r:.80}")
    return tuple(value)
