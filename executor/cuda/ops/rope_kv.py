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
        "plplplplppppfppiiiiiiii",
    )
    for in_packs in (True, False)
    for dtype, suffix in SUFFIXES.items()
    for is_fp8 in (False, True)
}


def rope_kv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    kv_rows: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return the queries and write ``kv`` as `rope_kv` does, with torch."""
    block_size = kv.shape[3]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    by_head = (len(q), 1, cos.shape[-1])
    q, k = (rope(heads, cos.view(by_head), sin.view(by_head)) for heads in (q, k))
    real = (kv_rows >= 0).nonzero().squeeze(1)
    blocks, places = kv_rows[real].long() // block_size, kv_rows[real].long() % block_size
    is_fp8 = kv.dtype == torch.float8_e4m3fn
    bits = torch.uint8 if is_fp8 else kv.dtype  # torch does not index fp8
    for plane, heads in zip(kv, (k, v), strict=True):
        # torch makes NaN of what is larger than the format holds
        written = heads[real].float().clamp(-FP8_MAX, FP8_MAX) if is_fp8 else heads[real]
        plane.view(bits)[blocks, :, places] = written.to(kv.dtype).view(bits)
    return torch.where((kv_rows >= 0)[:, None, None], q, torch.zeros_like(q))


def rope_kv(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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

    q: ``[num_tokens, num_heads, head_dim]``; k, v: ``[num_tokens, num_kv_heads, head_dim]``; a token's heads side by side, tokens
    may lie apart: they may be views of one tensor.
    cos, sin: ``[num_tokens, rotary_dim]`` or ``[num_tokens, 1, rotary_dim]``, the same dtype, as
    `quintet.executor.layers.rope` makes them; only the first half is read, as the second is the same.
    kv: ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` of the same dtype, or float8_e4m3fn: that saturates at 448.
    q_norm, k_norm: ``[head_dim]``, both or neither.
    out: like ``q``, and may be ``q``.

    Padding tokens write no KV; their queries are zeros. Bits equal the reference's in bf16 and fp16 (products of two such
    numbers are exact in fp32), except that the mean of a norm is summed in another order and may round otherwise; in
    fp32 the last product and sum are fused here. A token's bits depend on the token alone.
    """
    num_tokens, num_heads, head_dim = _check_heads(q, k, v, kv)
    num_kv_heads, rotary_dim = kv.shape[2], cos.shape[-1]
    _check_tables(q, cos, sin, rotary_dim)
    if rows.kv_rows is None or rows.num_tokens != num_tokens or rows.block_size != kv.shape[3]:
        raise ValueError(
            f"rows: expected kv_rows of {num_tokens} tokens in blocks of {kv.shape[3]}, got {rows.num_tokens} in"
            f" blocks of {rows.block_size}, {'without' if rows.kv_rows is None else 'with'} kv_rows"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither, got one")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_vector(name, weight, q)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _check_side_by_side("out", out, q.dtype, q.shape)
    in_packs, lanes = _variant(PACK_BYTES // q.element_size(), head_dim, rotary_dim)
    if num_tokens:
        device.launch(
            _KERNELS[in_packs, q.dtype, kv.dtype == torch.float8_e4m3fn],
            (-(-num_tokens * (num_heads + 2 * num_kv_heads) * lanes // THREADS), 1, 1),
            (THREADS, 1, 1),
            (
                *(q, q.stride(0), k, k.stride(0), v, v.stride(0), out, out.stride(0)),
                *(cos, sin, q_norm, k_norm, eps, kv, rows.kv_rows),
                *(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim),
                *(kv.shape[1], rows.block_size, lanes),
            ),
        )
    return out


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor) -> tuple[int, int, int]:
    """Return the shape of ``q``."""
    number_format(q)
    if kv.ndim != 5 or kv.shape[0] != 2 or not kv.is_contiguous():
        raise ValueError(
            "kv: expected contiguous [2, num_blocks, num_kv_heads, block_size, head_dim], got"
            f" {list(kv.shape)} with strides {kv.stride()}"
        )
    if kv.dtype not in (q.dtype, torch.float8_e4m3fn) or kv.data_ptr() % PACK_BYTES:
        raise ValueError(f"kv: expected {q.dtype} or torch.float8_e4m3fn, got {describe(kv)}")
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    num_heads = q.shape[1] if q.ndim == 3 else 0
    for name, heads, count in (("q", q, num_heads), ("k", k, num_kv_heads), ("v", v, num_kv_heads)):
        _check_side_by_side(name, heads, q.dtype, (len(q), count, head_dim))
    return len(q), num_heads, head_dim


def _check_side_by_side(
    name: str, heads: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | torch.Size
) -> None:
    fits = tuple(heads.shape) == tuple(shape) and heads.dtype == dtype
    side_by_side = fits and heads.stride()[1:] == (shape[2], 1)
    row_bytes = heads.stride(0) * heads.element_size() if len(heads) > 1 else 0
    packs = shape[2] * heads.element_size() % PACK_BYTES == 0
    if not side_by_side or (packs and (heads.data_ptr() % PACK_BYTES or row_bytes % PACK_BYTES)):
        raise ValueError(
            f"{name}: expected {dtype}{list(shape)}, a token's heads side by side, tokens at multiples of {PACK_BYTES} bytes,"
            f" got {describe(heads)}"
        )


def _check_tables(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.numel() == len(q) * rotary_dim and table.is_contiguous()
        if not fits or table.dtype != q.dtype or table.data_ptr() % PACK_BYTES:
            raise ValueError(
                f"{name}: expected contiguous {q.dtype}[{len(q)}, rotary_dim], got {describe(table)}"
            )
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[2]:
        raise ValueError(f"rotary_dim: expected an even number up to {q.shape[2]}, got {rotary_dim}")


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
