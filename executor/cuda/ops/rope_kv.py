"""Norm and rotation of queries and keys, and the write of keys and values into the paged cache, in one launch."""

from __future__ import annotations

import torch

from quintet.executor.cuda.device import Device, Kernel
from quintet.executor.cuda.ops.formats import PACK_BYTES, SUFFIXES, check_vector, describe, number_format
from quintet.executor.cuda.rows import StepRows
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope

THREADS = 128
MAX_SINGLE_LANES, MAX_SINGLE_ITEMS = 32, 8
FP8_MAX = 448.0

_KERNELS = {
    (in_packs, dtype, is_fp8): Kernel(
        "rope_kv",
        f"rope_kv{'' if in_packs else '_single'}_{suffix}{'_fp8kv' if is_fp8 else ''}",
        "pplppppfppiiiiiiii",
    )
    for in_packs in (True, False)
    for dtype, suffix in SUFFIXES.items()
    for is_fp8 in (False, True)
}


def rope_kv_reference(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    kv_rows: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return the queries and write ``kv`` as `rope_kv` does, with torch; ``qkv`` stays as it is."""
    num_kv_heads, block_size = kv.shape[2:4]
    queries, keys = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
    values = qkv[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)
    by_head = (len(qkv), 1, cos.shape[-1])
    queries, keys = (rope(heads, cos.view(by_head), sin.view(by_head)) for heads in (queries, keys))
    real = (kv_rows >= 0).nonzero().squeeze(1)
    blocks, places = kv_rows[real].long() // block_size, kv_rows[real].long() % block_size
    is_fp8 = kv.dtype == torch.float8_e4m3fn
    bits = torch.uint8 if is_fp8 else kv.dtype  # torch does not index fp8
    for plane, heads in zip(kv, (keys, values), strict=True):
        # torch makes NaN of what is larger than the format holds
        written = heads[real].float().clamp(-FP8_MAX, FP8_MAX) if is_fp8 else heads[real]
        plane.view(bits)[blocks, :, places] = written.to(kv.dtype).view(bits)
    return torch.where((kv_rows >= 0)[:, None, None], queries, torch.zeros_like(queries))


def rope_kv(
    device: Device,
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    rows: StepRows,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rotated queries ``[num_tokens, num_heads, head_dim]`` and write keys and values into ``kv``.

    qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, contiguous.
    cos, sin: ``[num_tokens, rotary_dim]`` or ``[num_tokens, 1, rotary_dim]``, the same dtype, as
    `quintet.executor.layers.rope` makes them; only the first half is read, as the second is the same.
    kv: ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` of the same dtype, or float8_e4m3fn: that saturates at 448.
    q_norm, k_norm: ``[head_dim]``, both or neither.
    out: ``[num_tokens, num_heads, head_dim]``, where a token's heads are contiguous; without it queries are rotated in
    place. Keys and values in ``qkv`` stay as they were.

    Padding tokens write no KV; their queries are zeros. Bits equal the reference's in bf16 and fp16 (products of two such
    numbers are exact in fp32), except that the mean of a norm is summed in another order and may round otherwise; in
    fp32 the last product and sum are fused here. A token's bits depend on the token alone.
    """
    num_tokens, all_heads, head_dim = _check_qkv(qkv, num_heads, kv)
    num_kv_heads = kv.shape[2]
    rotary_dim = cos.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.numel() == num_tokens * rotary_dim and table.is_contiguous()
        if not fits or table.dtype != qkv.dtype or table.data_ptr() % PACK_BYTES:
            raise ValueError(
                f"{name}: expected contiguous {qkv.dtype}[{num_tokens}, rotary_dim], got {describe(table)}"
            )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim: expected an even number up to {head_dim}, got {rotary_dim}")
    if rows.kv_rows is None or rows.num_tokens != num_tokens or rows.block_size != kv.shape[3]:
        raise ValueError(
            f"rows: expected kv_rows of {num_tokens} tokens in blocks of {kv.shape[3]}, got {rows.num_tokens} in"
            f" blocks of {rows.block_size}, {'without' if rows.kv_rows is None else 'with'} kv_rows"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither, got one")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_vector(name, weight, qkv)
    queries = _check_out(qkv, num_heads, out)
    in_packs, lanes = _variant(PACK_BYTES // qkv.element_size(), head_dim, rotary_dim)
    if num_tokens:
        device.launch(
            _KERNELS[in_packs, qkv.dtype, kv.dtype == torch.float8_e4m3fn],
            (-(-num_tokens * all_heads * lanes // THREADS), 1, 1),
            (THREADS, 1, 1),
            (
                *(qkv, queries, queries.stride(0), cos, sin, q_norm, k_norm, eps, kv, rows.kv_rows),
                *(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim),
                *(kv.shape[1], rows.block_size, lanes),
            ),
        )
    return queries


def _check_qkv(qkv: torch.Tensor, num_heads: int, kv: torch.Tensor) -> tuple[int, int, int]:
    number_format(qkv)
    if kv.ndim != 5 or kv.shape[0] != 2 or not kv.is_contiguous():
        raise ValueError(
            "kv: expected contiguous [2, num_blocks, num_kv_heads, block_size, head_dim], got"
            f" {list(kv.shape)} with strides {kv.stride()}"
        )
    if kv.dtype not in (qkv.dtype, torch.float8_e4m3fn) or kv.data_ptr() % PACK_BYTES:
        raise ValueError(f"kv: expected {qkv.dtype} or torch.float8_e4m3fn, got {describe(kv)}")
    expected = (num_heads + 2 * kv.shape[2], kv.shape[4])
    fits = qkv.ndim == 3 and tuple(qkv.shape[1:]) == expected and qkv.is_contiguous()
    if not fits or qkv.data_ptr() % PACK_BYTES:
        raise ValueError(
            f"qkv: expected contiguous [num_tokens, {expected[0]}, {expected[1]}], got {describe(qkv)}"
        )
    return qkv.shape[0], qkv.shape[1], qkv.shape[2]


def _check_out(qkv: torch.Tensor, num_heads: int, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return qkv[:, :num_heads]
    shape = (qkv.shape[0], num_heads, qkv.shape[2])
    contiguous = out.shape == shape and out.stride()[1:] == (shape[2], 1)
    aligned = out.data_ptr() % PACK_BYTES == 0 and out.stride(0) * out.element_size() % PACK_BYTES == 0
    packs = shape[2] * out.element_size() % PACK_BYTES == 0
    if not contiguous or out.dtype != qkv.dtype or (packs and not aligned):
        raise ValueError(
            f"out: expected {qkv.dtype}{list(shape)}, a token's heads contiguous, got {describe(out)}"
        )
    return out


def _variant(pack: int, head_dim: int, rotary_dim: int) -> tuple[bool, int]:
    """Return whether a head is taken in packs of so many numbers, and how many lanes own it: by its shape alone."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    if half % pack == 0 and rest % pack == 0:
        items = half // pack + -(-rest // (2 * pack))
        if items <= MAX_SINGLE_LANES:
            return True, 1 << (items - 1).bit_length()
    items = half + -(-rest // 2)
    if items > MAX_SINGLE_LANES * MAX_SINGLE_ITEMS:
        raise ValueError(
            f"head_dim: expected at most {2 * MAX_SINGLE_LANES * MAX_SINGLE_ITEMS}, got {head_dim}"
        )
    return False, MAX_SINGLE_LANES
