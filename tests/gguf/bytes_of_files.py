"""GGUF files built byte by byte, valid or invalid."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

F32, Q4_K = 0, 12
STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def tensor(name: str | bytes, sizes: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """sizes: innermost first, as in the file."""
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def file_of(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    **overrides: Any,
) -> bytes:
    """overrides: values of ``magic``, ``version``, ``num_keys``, ``num_tensors`` that replace the valid ones."""
    fields: Mapping[str, Any] = {
        "magic": b"GGUF",
        "version": 3,
        "num_keys": len(keys),
        "num_tensors": len(tensors),
    } | overrides
    head = fields["magic"] + struct.pack("<IQQ", fields["version"], fields["num_tensors"], fields["num_keys"])
    described = head + b"".join(keys) + b"".join(tensors)
    return described + bytes(-len(described) % 32) + data
