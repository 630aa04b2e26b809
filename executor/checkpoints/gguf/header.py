"""Header of a GGUF file: metadata, and type, shape and place of each tensor.

The file is untrusted: every count, size and offset is checked before use, so time and memory are bounded by the
header's size. Imports no torch. Format: docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.types import TYPES, UNREAD, GgmlType
from quintet.executor.checkpoints.weights.header import readable
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import LFS_ADVICE, LFS_POINTER

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22
"""Over all arrays: the largest vocabularies have 250 000 tokens and twice as many merges."""
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4
USUAL_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
_MOST_NUMBERS = (1 << 63) - 1

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Numeric metadata types."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings in the file's encoding: each string has an 8-byte length first."""

    raw: bytes
    count: int

    def __repr__(self) -> str:
        return f"a list of {self.count} texts"

    def texts(self) -> list[str]:
        """Return the strings. Raises `UnicodeDecodeError`."""
        raw, begin, found = self.raw, 0, []
        for _ in range(self.count):
            end = begin + 8 + _U64.unpack_from(raw, begin)[0]
            found.append(raw[begin + 8 : end].decode())
            begin = end
        return found


Value = int | float | bool | str | Strings | NDArray[np.generic]
"""Metadata value. An array of booleans is a numeric array."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Type, shape and place of a tensor."""

    type: GgmlType
    shape: tuple[int, ...]
    """Outermost dimension first, the reverse of the file's order; rows of ``shape[-1]`` values are whole blocks."""
    begin: int
    """Byte offset in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Parsed header of a file."""

    path: Path
    size: int
    modified_ns: int
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    raw: bytes
    """Bytes of the tensor descriptions: equal bytes mean equal tensors."""


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises `ConfigError` with the byte and the key or tensor."""
    try:
        with readable(path), path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < 24:
                raise _Malformed(
                    0, f"the file has only {status.st_size} bytes, less than a header: download it again"
                )
            with mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ) as mapped:
                reader = _Reader(mapped, status.st_size)
                metadata, tensors, raw = reader.read()
                return GgufHeader(path, status.st_size, status.st_mtime_ns, metadata, tensors, raw)
    except _Malformed as error:
        raise ConfigError(f"{path}: not a readable GGUF file: at byte {error.place}, {error.why}") from None


def _plain(number: np.generic) -> int | float:
    """Return a Python number; for a float32 the shortest decimal: 1e-6 instead of 9.99999997e-7."""
    value: int | float = float(str(number)) if isinstance(number, np.float32) else number.item()
    return value


class _Malformed(Exception):
    """Invalid content of a file."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


class _Reader:
    """Single-pass reader of a mapped file, up to the end of the tensor descriptions."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._map, self._size = mapped, size
        self._at = 0
        self._subject = "the file"
        self._strings = 0

    def read(self) -> tuple[dict[str, Value], dict[str, Tensor], bytes]:
        """Return metadata, tensors, and the bytes that describe these."""
        num_tensors, num_keys = self._counts()
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            self._subject = f"key number {len(metadata) + 1}"
            start = self._at
            key = self._text(MAX_KEY_BYTES)
            self._subject = f"{key!r:.80}"
            if key in metadata:
                raise self._wrong(f"{self._subject} is duplicated", start)
            metadata[key] = self._value(self._u32())
        alignment = self._alignment(metadata)
        start = self._at
        described = self._described(num_tensors)
        raw = self._map[start : self._at]
        data = -(-self._at // alignment) * alignment
        tensors = {
            name: self._placed(name, tensor, place, data, alignment)
            for name, (tensor, place) in described.items()
        }
        self._check_overlap(tensors)
        return metadata, tensors, raw

    def _counts(self) -> tuple[int, int]:
        magic, (version,) = self._map[:4], _U32.unpack_from(self._map, 4)
        if LFS_POINTER.startswith(magic):
            raise self._wrong(LFS_ADVICE, 0)
        if magic != MAGIC:
            raise self._wrong(f"the file begins with {magic!r}, not with {MAGIC!r}: it is not a GGUF file", 0)
        if version and not version & 0xFFFF:
            raise self._wrong(
                "big-endian files are not supported: use the little-endian file of the same model",
                4,
            )
        if version not in VERSIONS:
            raise self._wrong(
                f"unsupported version {version}; 2 and 3 are supported: convert the model again", 4
            )
        num_tensors, num_keys = (_U64.unpack_from(self._map, place)[0] for place in (8, 16))
        for what, count, most, least_bytes, place in (
            ("tensors", num_tensors, MAX_TENSORS, 24, 8),
            ("keys", num_keys, MAX_KEYS, 13, 16),
        ):
            if count > most:
                raise self._wrong(f"the file claims {count} {what}; at most {most} are allowed", place)
            if count * least_bytes > self._size:
                raise self._cut_off(f"claims {count} {what}", place)
        self._at = 24
        return num_tensors, num_keys

    def _value(self, kind: int) -> Value:
        if kind in _NUMBERS:
            return _plain(self._array(_NUMBERS[kind], 1)[0])
        if kind == _BOOL:
            return bool(self._truth(1)[0])
        if kind == _STRING:
            return self._text(self._size)
        if kind != _ARRAY:
            raise self._wrong(f"{self._subject} has the unknown type {kind}", self._at - 4)
        kind, count = self._u32(), self._u64()
        if kind in _NUMBERS:
            return self._array(_NUMBERS[kind], count)
        if kind == _BOOL:
            return self._truth(count)
        if kind == _STRING:
            return self._list(count)
        if kind == _ARRAY:
            raise self._wrong(f"{self._subject} is an array of arrays, which is not supported", self._at - 12)
        raise self._wrong(f"{self._subject} is an array of the unknown type {kind}", self._at - 12)

    def _array(self, dtype: str, count: int) -> NDArray[np.generic]:
        width = int(dtype[-1])
        if count > self._size // width:
            raise self._cut_off(f"claims {count} values of {width} bytes", self._at - 8)
        begin = self._take(count * width)
        return np.frombuffer(self._map[begin : self._at], dtype)

    def _truth(self, count: int) -> NDArray[np.generic]:
        values = self._array("<u1", count)
        if values.size and values.tobytes().translate(None, b"\0\1"):
            raise self._wrong(f"{self._subject} has a boolean that is neither 0 nor 1", self._at - count)
        return values

    def _list(self, count: int) -> Strings:
        begin, mapped, size = self._at, self._map, self._size
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._wrong(
                f"{self._subject} claims {count} strings; all arrays together may have at most {MAX_STRINGS}",
                begin - 8,
            )
        if count > size // 8:
            raise self._cut_off(f"claims {count} strings", begin - 8)
        at, unpack = begin, _U64.unpack_from
        for _ in range(count):
            if at + 8 > size:
                raise self._cut_off("continues", at)
            at += 8 + unpack(mapped, at)[0]
        if at > size:
            raise self._cut_off("continues", begin)
        self._at = at
        return Strings(mapped[begin:at], count)

    def _text(self, most: int) -> str:
        num_bytes = self._u64()
        if num_bytes > self._size:
            raise self._cut_off(f"claims a string of {num_bytes} bytes", self._at - 8)
        if num_bytes > most:
            raise self._wrong(
                f"{self._subject} claims a string of {num_bytes} bytes; at most {most} are allowed",
                self._at - 8,
            )
        begin = self._take(num_bytes)
        try:
            return self._map[begin : self._at].decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{self._subject} is not UTF-8 text", begin) from None

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", USUAL_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._wrong(
                f"general.alignment is {alignment!r:.40}; it must be a power of two up to {MAX_ALIGNMENT}"
            )
        return alignment

    def _described(self, count: int) -> dict[str, tuple[Tensor, int]]:
        """Return the tensors, with offsets among each other, and the byte of each description."""
        found: dict[str, tuple[Tensor, int]] = {}
        for number in range(count):
            self._subject = f"tensor number {number + 1} of {count}"
            place = self._at
            name = self._text(MAX_NAME_BYTES)
            self._subject = f"tensor {name!r:.80}"
            if name in found:
                raise self._wrong(f"{self._subject} is duplicated", place)
            dimensions = self._u32()
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._wrong(
                    f"{self._subject} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
                )
            shape = tuple(self._u64() for _ in range(dimensions))[::-1]
            type_ = self._type(self._u32())
            if not all(shape) or math.prod(shape) > _MOST_NUMBERS or shape[-1] % type_.block:
                blocks = f"; rows must be whole blocks of {type_.block}" if type_.block > 1 else ""
                raise self._wrong(
                    f"{self._subject} has the shape {list(shape)!s:.90}, which is invalid for {type_.name}{blocks}"
                )
            found[name] = Tensor(type_, shape, self._u64(), type_.num_bytes(math.prod(shape))), place
        return found

    def _type(self, number: int) -> GgmlType:
        if number in TYPES:
            return TYPES[number]
        name = UNREAD.get(number, "unknown")
        raise self._wrong(
            f"{self._subject} has the unsupported type {number} ({name}); supported: "
            f"{', '.join(each.name for each in TYPES.values())}",
            self._at - 4,
        )

    def _placed(self, name: str, tensor: Tensor, place: int, data: int, alignment: int) -> Tensor:
        """Return a tensor at its place in the file; ``data``: begin of all tensors."""
        begin = data + tensor.begin
        if tensor.begin % alignment:
            raise self._wrong(
                f"tensor {name!r:.80} is at {tensor.begin}, not a multiple of the alignment {alignment}",
                place,
            )
        if tensor.begin > self._size or begin + tensor.num_bytes > self._size:
            raise self._wrong(
                f"tensor {name!r:.80} needs bytes {begin} to {begin + tensor.num_bytes} of {self._size}: the file is"
                " truncated or damaged; download it again",
                place,
            )
        return replace(tensor, begin=begin)

    def _check_overlap(self, tensors: dict[str, Tensor]) -> None:
        """Reject overlapping tensors."""
        ordered = sorted(tensors, key=lambda name: tensors[name].begin)
        for name, following in pairwise(ordered):
            end = tensors[name].begin + tensors[name].num_bytes
            if end > tensors[following].begin:
                raise self._wrong(
                    f"tensor {following!r:.80} begins within tensor {name!r:.80}", tensors[following].begin
                )

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._map, self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._map, self._take(8))[0]
        return value

    def _take(self, num_bytes: int) -> int:
        """Advance by ``num_bytes``; return the start. Raises `_Malformed` at the end of the file."""
        begin = self._at
        if num_bytes > self._size - begin:
            raise self._cut_off("continues", begin)
        self._at = begin + num_bytes
        return begin

    def _cut_off(self, claims: str, place: int) -> _Malformed:
        """Return the error for a truncated file."""
        why = f"{self._subject} {claims}, beyond the file's {self._size} bytes: truncated or damaged file; download it again"
        return _Malformed(place, why)

    def _wrong(self, why: str, place: int | None = None) -> _Malformed:
        return _Malformed(self._at if place is None else place, why)
