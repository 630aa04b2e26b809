"""Argument checks that kernels share: dtypes, rows, vectors and KV planes.

A kernel uses 16-byte loads if the row size is a multiple of 16 bytes; every row must then be aligned to 16 bytes. The checks
raise `ValueError` for bugs of the caller, which would make a kernel access other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PACK_BYTES = 16

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def number_format(x: torch.Tensor) -> str:
    """Return the dtype suffix of kernel names."""
    suffix = SUFFIXES.get(x.dtype)
    if suffix is None:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, SUFFIXES))}, got {x.dtype}")
    return suffix


def check_rows(name: str, rows: torch.Tensor, like: torch.Tensor, shape: Sequence[int] | None = None) -> None:
    """Check a matrix with contiguous rows: dtype and device of ``like``, shape if given, 16-byte alignment."""
    number_format(rows)
    expected = (
        f"{like.dtype}{'[rows, width]' if shape is None else list(shape)} on {like.device}, rows contiguous"
    )
    matches = shape is None or tuple(rows.shape) == tuple(shape)
    # The stride of a dimension of one element is arbitrary.
    contiguous = rows.ndim == 2 and (rows.shape[1] <= 1 or rows.stride(1) == 1)
    if not (matches and contiguous and rows.dtype == like.dtype and rows.device == like.device):
        raise ValueError(f"{name}: expected {expected}, got {describe(rows)}")
    if rows.shape[1] * rows.element_size() % PACK_BYTES:
        return
    row_bytes = rows.stride(0) * rows.element_size() if len(rows) > 1 else 0
    if rows.data_ptr() % PACK_BYTES or row_bytes % PACK_BYTES:
        raise ValueError(f"{name}: expected rows aligned to {PACK_BYTES} bytes, got {describe(rows)}")


def check_vector(name: str, vector: torch.Tensor, rows: torch.Tensor) -> None:
    """Check a contiguous, 16-byte aligned vector as wide as ``rows``, of the same dtype and device."""
    width = rows.shape[-1]
    fits = vector.shape == (width,) and vector.is_contiguous() and vector.data_ptr() % PACK_BYTES == 0
    if not (fits and vector.dtype == rows.dtype and vector.device == rows.device):
        raise ValueError(
            f"{name}: expected contiguous {rows.dtype}[{width}] on {rows.device} at a multiple of {PACK_BYTES}"
            f" bytes, got {describe(vector)}"
        )


def describe(x: torch.Tensor) -> str:
    """Describe a tensor for an error message."""
    return (
        f"{x.dtype}{list(x.shape)} on {x.device}, strides {x.stride()}, {x.data_ptr() % PACK_BYTES} bytes past a"
        f" multiple of {PACK_BYTES}"
    )


Planes = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""Keys and values of a layer, each ``[num_blocks, num_kv_heads, block_size, width]``, or both in one tensor ``[2, ...]``."""


def are_in_keys(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether values are a prefix of the keys and not stored separately."""
    return values.data_ptr() == keys.data_ptr()


def check_planes(kv: Planes, dtype: torch.dtype, block: tuple[int, int], widths: tuple[int, int]) -> None:
    """Raise `ValueError` unless keys and values have these widths in blocks ``[num_kv_heads, block_size, width]``."""
    keys, values = kv
    check_plane("keys", keys, dtype, (*block, widths[0]), keys.stride(0))
    if not are_in_keys(keys, values):
        check_plane("values", values, dtype, (*block, widths[1]), keys.stride(0))
    elif values.shape != (*keys.shape[:3], widths[1]) or values.stride() != keys.stride():
        raise ValueError(
            f"values: expected the first {widths[1]} elements of each key, got {describe(values)}"
        )


def check_plane(
    name: str, plane: torch.Tensor, dtype: torch.dtype, block: tuple[int, int, int], block_stride: int
) -> None:
    """Raise `ValueError` unless the plane has contiguous blocks of this shape and stride."""
    fits = tuple(plane.shape[1:]) == block and plane.dtype == dtype
    blocks_fit = len(plane) == 1 or (fits and plane.stride(0) == block_stride)
    inner = (block[1] * block[2], block[2], 1)
    if not (fits and blocks_fit) or plane.stride()[1:] != inner or plane.data_ptr() % PACK_BYTES:
        raise ValueError(
            f"{name}: expected {dtype}[num_blocks, {block[0]}, {block[1]}, {block[2]}], contiguous blocks with stride"
            f" {block_stride}, aligned to {PACK_BYTES} bytes, got {describe(plane)}"
        )
