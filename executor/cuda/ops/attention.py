"""Causal attention of a step's new tokens over the paged cache, single tokens and chunks alike.

The reference is `quintet.executor.cuda.ops.attention_reference`; what a plan owns, `AttentionPlan`.
"""

from __future__ import annotations

import torch

from quintet.executor.cuda.device import Device
from quintet.executor.cuda.ops.attention_plan import DECODE_PATCH, THREADS, AttentionPlan, MatrixKernels
from quintet.executor.cuda.ops.formats import PACK_BYTES, describe
from quintet.executor.cuda.rows import StepRows

__all__ = ["AttentionPlan", "paged_attention"]

MAX_BLOCK_SIZE = 1024
"""See ``inverse_size`` in csrc/cuda/attention.cuh."""


def paged_attention(
    device: Device,
    plan: AttentionPlan,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: StepRows,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(q k^T * scale) v`` of each token over the positions up to its own.

    q: ``[num_tokens, num_heads, head_dim]``, tokens at any distance (a slice of ``qkv``); kv: ``[2, num_blocks,
    num_kv_heads, block_size, head_dim]``, in which the new tokens' keys and values were written already; out: like ``q``
    without gaps. `AttentionPlan.prepare` has been launched for ``rows``. ``scale`` is positive. window: positions that a
    token sees, its own included. soft_cap: logits become ``cap * tanh(logit / cap)``; 0 for none. alibi: fp32 slopes
    ``[num_heads]``, times the distance (negative) to the position. Padding tokens get zeros.

    Positions beyond a row's length and those that left the window are never read. A row's bits do not depend on the
    other rows where the plan has fixed splits.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _check(plan, q, kv, rows, scale, alibi, out)
    if rows.num_tokens == 0:
        return out
    if plan.matrix is None:
        _launch_plain(device, plan, q, kv, rows, scale, window, soft_cap, alibi, out)
    else:
        _launch_matrix(device, plan, plan.matrix, q, kv, rows, scale, window, soft_cap, alibi, out)
    return out


def _launch_matrix(
    device: Device,
    plan: AttentionPlan,
    kernels: MatrixKernels,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: StepRows,
    scale: float,
    window: int | None,
    soft_cap: float,
    alibi: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    positions = 0 if window is None else window
    front = (out, q, kv, rows.slots, rows.starts, rows.counts, rows.offsets, rows.block_table)
    shape = (plan.max_rows, plan.num_heads, plan.num_kv_heads, plan.head_dim)
    cache = (rows.block_size, rows.block_table.shape[1], q.stride(0), positions, plan.split_tiles)
    tail = (kv.stride(0), scale, soft_cap)
    # Rows of at most 16 lines are the decode kernel's, all others the chunk kernel's (`is_decode` in attention.cuh).
    has_decode, has_chunks = plan.group <= DECODE_PATCH, rows.max_count * plan.group > DECODE_PATCH
    work: tuple[torch.Tensor | None, ...]
    if has_decode:
        fit = kernels.decode_fit
        work = (plan.table(window, False), plan.decode_sums, plan.decode_stats, None, plan.decode_tickets)
        sizes = (rows.num_rows, rows.num_tokens, *shape, *cache, fit.stages)
        device.launch(
            kernels.decode,
            (plan.decode_blocks, 1, 1),
            (THREADS, 1, 1),
            (*front, *work, alibi, *sizes, *tail),
            fit.shared_bytes,
        )
    if has_chunks:
        fit = kernels.chunk_fit
        work = (plan.table(window, True), plan.chunk_sums, plan.chunk_stats, plan.totals, plan.chunk_tickets)
        # Padding tokens are one kernel's work.
        sizes = (rows.num_rows, 0 if has_decode else rows.num_tokens, *shape, *cache, fit.stages)
        device.launch(
            kernels.chunk,
            (plan.chunk_blocks, 1, 1),
            (THREADS, 1, 1),
            (*front, *work, alibi, *sizes, *tail),
            fit.shared_bytes,
        )


def _launch_plain(
    device: Device,
    plan: AttentionPlan,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: StepRows,
    scale: float,
    window: int | None,
    soft_cap: float,
    alibi: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    device.launch(
        plan.plain,
        (rows.num_tokens, plan.num_heads, 1),
        (THREADS, 1, 1),
        (
            *(out, q, kv, rows.slots, rows.positions, rows.token_rows, rows.block_table, alibi),
            *(plan.num_heads, plan.num_kv_heads, plan.head_dim, rows.block_size, rows.block_table.shape[1]),
            *(q.stride(0), 0 if window is None else window, kv.stride(0), scale, soft_cap),
        ),
    )


def _check(
    plan: AttentionPlan,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: StepRows,
    scale: float,
    alibi: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Raise `ValueError` that names the tensor: a kernel would read or write other memory."""
    shape = (rows.num_tokens, plan.num_heads, plan.head_dim)
    row_bytes = q.stride(0) * q.element_size()
    packed = plan.matrix is None or not (row_bytes % PACK_BYTES or q.data_ptr() % PACK_BYTES)
    inner = q.shape[1:].numel() <= 1 or q[:1].is_contiguous()
    if tuple(q.shape) != shape or q.dtype != plan.dtype or not (inner and packed):
        raise ValueError(
            f"q: expected {plan.dtype}{list(shape)}, each token without gaps and beginning at a multiple of {PACK_BYTES}"
            f" bytes, got {describe(q)}"
        )
    if tuple(out.shape) != shape or out.dtype != plan.dtype or not out.is_contiguous() or out.data_ptr() % 4:
        raise ValueError(f"out: expected contiguous {plan.dtype}{list(shape)}, got {describe(out)}")
    cache = (2, kv.shape[1] if kv.ndim > 1 else 0, plan.num_kv_heads, rows.block_size, plan.head_dim)
    if (
        tuple(kv.shape) != cache
        or kv.dtype != plan.kv_dtype
        or not kv.is_contiguous()
        or kv.data_ptr() % PACK_BYTES
    ):
        raise ValueError(
            f"kv: expected contiguous {plan.kv_dtype} [2, num_blocks, {plan.num_kv_heads}, {rows.block_size},"
            f" {plan.head_dim}] at a multiple of {PACK_BYTES} bytes, got {describe(kv)}"
        )
    if not 2 <= rows.block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block_size is {rows.block_size}; blocks of 2 to {MAX_BLOCK_SIZE} positions are read"
        )
    if rows.block_table.ndim != 2 or not rows.block_table.is_contiguous():
        raise ValueError(
            f"block_table: expected contiguous [max_num_seqs, max_blocks], got {describe(rows.block_table)}"
        )
    if alibi is not None and (
        alibi.shape != (plan.num_heads,) or alibi.dtype != torch.float32 or not alibi.is_contiguous()
    ):
        raise ValueError(f"alibi: expected contiguous torch.float32[{plan.num_heads}], got {describe(alibi)}")
    for name, x in (("kv", kv), ("out", out), ("block_table", rows.block_table), ("alibi", alibi)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected on {q.device} as q is, got {describe(x)}")
    if not scale > 0.0:
        raise ValueError(f"scale is {scale}; expected a positive number")
