"""Causal paged attention of prefill and decode. `AttentionPlan` owns the buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import (
    DECODE_QUERY_TILE,
    THREADS,
    AttentionPlan,
    MatrixKernels,
)
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES, Planes, check_planes, describe
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.models.layers.attention import AttentionWindow

__all__ = ["AttentionPlan", "paged_attention"]


def paged_attention(
    device: Device,
    plan: AttentionPlan,
    q: torch.Tensor,
    kv: Planes,
    rows: StepRows,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Return ``softmax(q k^T * scale) v * value_scale`` of each token over the positions up to its own.

    `AttentionPlan.prepare` must have been launched for ``rows``.

    - q: ``[num_tokens, num_heads, head_dim]``, tokens strided (a slice of ``qkv``).
    - kv: keys and values, each ``[num_blocks, num_kv_heads, block_size, head_dim or value_dim]``, with equal block strides. They
      already hold the new tokens. Values may be a prefix of the keys.
    - out: contiguous ``[num_tokens, num_heads, value_dim]``; zeros for padding tokens.
    - scale: positive.
    - window: number of positions that a token attends to, itself included. chunk: size of the chunks; a token attends only to its
      own chunk. See `AttentionWindow`.
    - soft_cap: logits become ``cap * tanh(logit / cap)``; 0 for none.
    - alibi: fp32 slopes ``[num_heads]``, times the (negative) distance.
    - sinks: fp32 ``[num_heads]``, a logit without a value.

    Positions beyond a row's length or outside the window are not read. With fixed splits, a row's bits do not depend on other
    rows.
    """
    out = q.new_empty((*q.shape[:2], plan.value_dim)) if out is None else out
    if device.checks_arguments:
        _check(plan, q, kv, rows, scale, {"alibi": alibi, "sinks": sinks}, out)
    if rows.num_tokens == 0:
        return out
    call = _Call(q, kv, rows, scale, AttentionWindow(window, chunk), soft_cap, alibi, sinks, out, value_scale)
    if plan.matrix is None:
        _launch_plain(device, plan, call)
    else:
        _launch_matrix(device, plan, plan.matrix, call)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of `paged_attention`."""

    q: torch.Tensor
    kv: Planes
    rows: StepRows
    scale: float
    attention_window: AttentionWindow
    soft_cap: float
    alibi: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    value_scale: float


def _launch_matrix(device: Device, plan: AttentionPlan, kernels: MatrixKernels, call: _Call) -> None:
    rows, (keys, values), attention_window = call.rows, call.kv, call.attention_window
    front = (call.out, call.q, keys, rows.slots, rows.starts, rows.counts, rows.offsets, rows.block_table)
    shape = (plan.max_rows, plan.num_heads, plan.num_kv_heads, plan.head_dim)
    limits = (attention_window.window or 0, attention_window.chunk or 0)
    cache = (rows.block_size, rows.block_table.shape[1], call.q.stride(0), *limits, plan.split_tiles)
    plane = (values.data_ptr() - keys.data_ptr()) // keys.element_size()
    tail = (plane, keys.stride(0), call.scale, call.soft_cap, call.value_scale)
    # The decode kernel computes rows of at most 16 queries, the chunk kernel all others (`is_decode` in attention.cuh).
    has_decode, has_chunks = plan.group <= DECODE_QUERY_TILE, rows.max_count * plan.group > DECODE_QUERY_TILE
    num_tokens = rows.num_tokens
    for each, for_chunks, is_used in ((kernels.decode, False, has_decode), (kernels.chunk, True, has_chunks)):
        if not is_used:
            continue
        work = (plan.table(attention_window, for_chunks), each.sums, each.stats, each.totals, each.tickets)
        sizes = (rows.num_rows, num_tokens, *shape, *cache, each.fit.stages)
        device.launch(
            each.kernel,
            (each.blocks, 1, 1),
            (THREADS, 1, 1),
            (*front, *work, call.alibi, call.sinks, *sizes, *tail),
            each.fit.shared_bytes,
        )
        num_tokens = 0  # only one kernel zeroes padding tokens


def _launch_plain(device: Device, plan: AttentionPlan, call: _Call) -> None:
    rows, (keys, values), attention_window = call.rows, call.kv, call.attention_window
    device.launch(
        plan.plain,
        (rows.num_tokens, plan.num_heads, 1),
        (THREADS, 1, 1),
        (
            *(call.out, call.q, keys, values, rows.slots, rows.positions, rows.token_rows, rows.block_table),
            *(call.alibi, call.sinks, plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.value_dim),
            *(values.stride(2), rows.block_size, rows.block_table.shape[1], call.q.stride(0)),
            *(
                attention_window.window or 0,
                attention_window.chunk or 0,
                keys.stride(0),
                call.scale,
                call.soft_cap,
            ),
            call.value_scale,
        ),
    )


def _check(
    plan: AttentionPlan,
    q: torch.Tensor,
    kv: Planes,
    rows: StepRows,
    scale: float,
    of_heads: dict[str, torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    """Raise `ValueError` for an unsupported tensor; a kernel would access other memory."""
    shape = (rows.num_tokens, plan.num_heads, plan.head_dim)
    row_bytes = q.stride(0) * q.element_size()
    packed = plan.matrix is None or not (row_bytes % PACK_BYTES or q.data_ptr() % PACK_BYTES)
    inner = q.shape[1:].numel() <= 1 or q[:1].is_contiguous()
    if tuple(q.shape) != shape or q.dtype != plan.dtype or not (inner and packed):
        raise ValueError(
            f"q: expected {plan.dtype}{list(shape)}, each token contiguous and aligned to {PACK_BYTES} bytes, got {describe(q)}"
        )
    result = (*shape[:2], plan.value_dim)
    if tuple(out.shape) != result or out.dtype != plan.dtype or not out.is_contiguous() or out.data_ptr() % 4:
        raise ValueError(f"out: expected contiguous {plan.dtype}{list(result)}, got {describe(out)}")
    check_planes(kv, plan.kv_dtype, (plan.num_kv_heads, rows.block_size), (plan.head_dim, plan.value_dim))
    if not plan.supports_block_size(rows.block_size):
        raise ValueError(
            f"block_size {rows.block_size} is not supported for sequences of {plan.max_model_len}"
        )
    if rows.block_table.ndim != 2 or not rows.block_table.is_contiguous():
        raise ValueError(
            f"block_table: expected contiguous [max_num_seqs, max_blocks], got {describe(rows.block_table)}"
        )
    for name, x in of_heads.items():
        if x is not None and (
            x.shape != (plan.num_heads,) or x.dtype != torch.float32 or not x.is_contiguous()
        ):
            raise ValueError(
                f"{name}: expected contiguous torch.float32[{plan.num_heads}], got {describe(x)}"
            )
    for name, x in {"keys": kv[0], "out": out, "block_table": rows.block_table, **of_heads}.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device} like q, got {describe(x)}")
    if not scale > 0.0:
        raise ValueError(f"scale is {scale}; expected a positive number")
