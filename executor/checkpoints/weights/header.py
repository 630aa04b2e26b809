"""Header of a safetensors file: type, shape and place of each tensor.

Parsed here because the safetensors package copies each tensor. The header is untrusted: offsets, shapes and number
formats are checked against the file's size. Format: the README of huggingface/safetensors, section "Format". Imports
no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quintet.wire.errors import ConfigError
from quintet.wire.model_files import ITEM_BYTES, LFS_ADVICE, LFS_POINTER

MAX_HEADER_BYTES = 100 << 20


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert errors of the file system to a `ConfigError`."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; download it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Entry:
    """Type, shape and place of a tensor."""

    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    begin: int
    """Byte offset in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Parsed header of a file."""

    raw: bytes
    entries: dict[str, Entry]
    """Keyed by tensor name."""


def read_header(path: Path, file: BinaryIO, size: int) -> SafetensorsHeader:
    """Read the header of a file of ``size`` bytes, opened at its beginning. Raises `ConfigError`."""
    try:
        raw = _raw(file, size)
        parsed = json.loads(raw)
        if not isinstance(parsed, dict):
            raise ValueError("the header is not a JSON object")
        begin = 8 + len(raw)
        return SafetensorsHeader(
            raw,
            {
                name: _entry(name, value, begin, size)
                for name, value in parsed.items()
                if name != "__metadata__"
            },
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a readable safetensors file ({error}); download it again, or test without weights: "
            "--load-format dummy or --executor mock"
        ) from error


def _raw(file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"the file has only {size} bytes, less than a header")
    if LFS_POINTER.startswith(prefix):
        raise ValueError(LFS_ADVICE)
    (num_bytes,) = struct.unpack("<Q", prefix)
    if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"the header claims {num_bytes} of {size} bytes")
    return file.read(num_bytes)


def _entry(name: str, value: object, data_begin: int, size: int) -> Entry:
    if not isinstance(value, dict):
        raise ValueError(f"tensor {name!r:.80} has the invalid description {value!r:.80}")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r:.80} has the unknown number format {dtype!r:.80}")
    shape = _whole_numbers(name, "shape", value.get("shape"))
    offsets = _whole_numbers(name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_begin:
        raise ValueError(
            f"tensor {name!r:.80} is at {list(offsets)!s:.80} of {size - data_begin} bytes; the file may be truncated"
        )
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r:.80} of shape {list(shape)!s:.80} takes {num_bytes} bytes")
    return Entry(dtype, shape, data_begin + offsets[0], num_bytes)


def _whole_numbers(name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in value
    ):
        raise ValueError(f"tensor {name!r:.80} has invalid {key} {value!s:.80}")
    return tuple(value)
