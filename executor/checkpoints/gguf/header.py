"""The header of a GGUF file: its metadata, and which tensors there are, of which kind and shape, and where they lie.

Nothing in it is believed: every count, size and offset is checked against the file before it is used, so that reading takes
time and memory of the header's order, whatever it claims. Imports no torch. Format: docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.types import TYPES, UNREAD, GgmlType
from quintet.wire.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22
"""In all arrays together: the largest vocabularies have a quarter of a million tokens and twice as many merges."""
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
"""Kinds of metadata that are numbers."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings as it lies in the file: a length of 8 bytes before each."""

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
"""Of metadata. An array of truth values is one of numbers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies."""

    type: GgmlType
    shape: tuple[int, ...]
    """Outermost first, the other way round than the file has it: rows of ``shape[-1]`` numbers are whole blocks."""
    begin: int
    """Byte of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    path: Path
    size: int
    modified_ns: int
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    raw: bytes
    """Of the description of the tensors: equal bytes, equal meaning."""


def read_header(path: Path) -> Header:
    """Return the header of a file. Raises `ConfigError` of one line that names the byte, and the key or tensor."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < 24:
                raise _Senseless(0, f"it has {status.st_size} bytes, not even a header: download it again")
            with mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ) as mapped:
                reader = _Reader(mapped, status.st_size)
                metadata, tensors, raw = reader.read()
                return Header(path, status.st_size, status.st_mtime_ns, metadata, tensors, raw)
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; download it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except _Senseless as error:
        raise ConfigError(f"{path}: not a readable GGUF file: at byte {error.place}, {error.why}") from None


def _plain(number: np.generic) -> int | float:
    """Return a number of Python: for a float32 the shortest that it is the nearest of, 1e-6 rather than 9.99999997e-7."""
    value: int | float = float(str(number)) if isinstance(number, np.float32) else number.item()
    return value


class _Senseless(Exception):
    """What was found is not what a file may have."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


class _Reader:
    """Goes once through a mapped file, from its first byte to the end of the directory of tensors."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._map, self._size = mapped, size
        self._at = 0
        self._subject = "it"
        self._strings = 0

    def read(self) -> tuple[dict[str, Value], dict[str, Tensor], bytes]:
        """Return metadata, tensors, and the bytes that describe these."""
        num_tensors, num_keys = self._counts()
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            self._subject = f"key number {len(metadata) + 1}"
            begun = self._at
            key = self._text(MAX_KEY_BYTES)
            self._subject = f"{key!r:.80}"
            if key in metadata:
                raise self._wrong(f"{self._subject} is there twice", begun)
            metadata[key] = self._value(self._u32())
        alignment = self._alignment(metadata)
        begun = self._at
        described = self._described(num_tensors)
        raw = self._map[begun : self._at]
        data = -(-self._at // alignment) * alignment
        tensors = {
            name: self._placed(name, type_, shape, offset, place, data, alignment)
            for name, (type_, shape, offset, place) in described.items()
        }
        self._check_apart(tensors)
        return metadata, tensors, raw

    def _counts(self) -> tuple[int, int]:
        magic, (version,) = self._map[:4], _U32.unpack_from(self._map, 4)
        if magic != MAGIC:
            raise self._wrong(f"it begins with {magic!r}, not with {MAGIC!r}: it is no GGUF file", 0)
        if version and not version & 0xFFFF:
            raise self._wrong(
                "its numbers are big endian, which is not supported: take the little-endian file of the same model",
                4,
            )
        if version not in VERSIONS:
            raise self._wrong(f"its version is {version}; 2 and 3 are read: convert the model again", 4)
        num_tensors, num_keys = (_U64.unpack_from(self._map, place)[0] for place in (8, 16))
        for what, count, most, least_bytes, place in (
            ("tensors", num_tensors, MAX_TENSORS, 24, 8),
            ("keys", num_keys, MAX_KEYS, 13, 16),
        ):
            if count > most:
                raise self._wrong(f"it claims {count} {what}; there may be {most}", place)
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
            raise self._wrong(f"{self._subject} is of the unknown kind {kind}", self._at - 4)
        kind, count = self._u32(), self._u64()
        if kind in _NUMBERS:
            return self._array(_NUMBERS[kind], count)
        if kind == _BOOL:
            return self._truth(count)
        if kind == _STRING:
            return self._list(count)
        if kind == _ARRAY:
            raise self._wrong(f"{self._subject} is an array of arrays, which no model has", self._at - 12)
        raise self._wrong(f"{self._subject} is an array of the unknown kind {kind}", self._at - 12)

    def _array(self, dtype: str, count: int) -> NDArray[np.generic]:
        width = int(dtype[-1])
        if count > self._size // width:
            raise self._cut_off(f"claims {count} numbers of {width} bytes", self._at - 8)
        begin = self._take(count * width)
        return np.frombuffer(self._map[begin : self._at], dtype)

    def _truth(self, count: int) -> NDArray[np.generic]:
        values = self._array("<u1", count)
        if values.size and values.tobytes().translate(None, b"\0\1"):
            raise self._wrong(f"{self._subject} has a truth value that is neither 0 nor 1", self._at - count)
        return values

    def _list(self, count: int) -> Strings:
        begin, mapped, size = self._at, self._map, self._size
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._wrong(
                f"{self._subject} claims {count} strings; all arrays together may have {MAX_STRINGS}",
                begin - 8,
            )
        if count > size // 8:
            raise self._cut_off(f"claims {count} strings", begin - 8)
        at, unpack = begin, _U64.unpack_from
        for _ in range(count):
            if at + 8 > size:
                raise self._cut_off("goes on", at)
            at += 8 + unpack(mapped, at)[0]
        if at > size:
            raise self._cut_off("goes on", begin)
        self._at = at
        return Strings(mapped[begin:at], count)

    def _text(self, most: int) -> str:
        num_bytes = self._u64()
        if num_bytes > self._size:
            raise self._cut_off(f"claims a text of {num_bytes} bytes", self._at - 8)
        if num_bytes > most:
            raise self._wrong(
                f"{self._subject} claims a text of {num_bytes} bytes; here are at most {most}", self._at - 8
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

    def _described(self, count: int) -> dict[str, tuple[GgmlType, tuple[int, ...], int, int]]:
        """Return of each tensor its type, shape, offset, and where the file says so."""
        found: dict[str, tuple[GgmlType, tuple[int, ...], int, int]] = {}
        for number in range(count):
            self._subject = f"tensor number {number + 1} of {count}"
            place = self._at
            name = self._text(MAX_NAME_BYTES)
            self._subject = f"tensor {name!r:.80}"
            if name in found:
                raise self._wrong(f"{self._subject} is there twice", place)
            dimensions = self._u32()
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._wrong(
                    f"{self._subject} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
                )
            shape = tuple(self._u64() for _ in range(dimensions))[::-1]
            type_ = self._type(self._u32())
            if not all(shape) or math.prod(shape) > _MOST_NUMBERS or shape[-1] % type_.block:
                blocks = f", in rows of whole blocks of {type_.block}" if type_.block > 1 else ""
                raise self._wrong(
                    f"{self._subject} has the shape {list(shape)!s:.90}; {type_.name} has none{blocks}"
                )
            found[name] = type_, shape, self._u64(), place
        return found

    def _type(self, number: int) -> GgmlType:
        if number in TYPES:
            return TYPES[number]
        name = UNREAD.get(number, "unknown")
        raise self._wrong(
            f"{self._subject} has the number format {number} ({name}), which is not read; these are: "
            f"{', '.join(each.name for each in TYPES.values())}",
            self._at - 4,
        )

    def _placed(
        self,
        name: str,
        type_: GgmlType,
        shape: tuple[int, ...],
        offset: int,
        place: int,
        data: int,
        alignment: int,
    ) -> Tensor:
        num_bytes = type_.num_bytes(math.prod(shape))
        if offset % alignment:
            raise self._wrong(
                f"tensor {name!r:.80} lies at {offset}, no multiple of the alignment {alignment}", place
            )
        if offset > self._size or data + offset + num_bytes > self._size:
            raise self._wrong(
                f"tensor {name!r:.80} takes bytes {data + offset} to {data + offset + num_bytes} of {self._size}: the file is cut"
                " off or damaged; download it again",
                place,
            )
        return Tensor(type_, shape, data + offset, num_bytes)

    def _check_apart(self, tensors: dict[str, Tensor]) -> None:
        """Reject tensors that share bytes."""
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
        """Go on by so many bytes, which there must be; return where they begin."""
        begin = self._at
        if num_bytes > self._size - begin:
            raise self._cut_off("goes on", begin)
        self._at = begin + num_bytes
        return begin

    def _cut_off(self, claims: str, place: int) -> _Senseless:
        """Make the error for what the file is too short for."""
        why = f"{self._subject} {claims}, beyond the file's {self._size} bytes: it is cut off or damaged; download it again"
        return _Senseless(place, why)

    def _wrong(self, why: str, place: int | None = None) -> _Senseless:
        return _Senseless(self._at if place is None else place, why)
