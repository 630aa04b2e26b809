"""Torch references of CUDA operations. They read values on the host, which synchronizes the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.rms_norm import rms_norm
from quintet.executor.backends.cpu.ops.rope_kv_write import rope, temperatures
from quintet.executor.backends.cuda.ops.activation import Gate
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.ops.linear_fp8 import FP8_MAX
from quintet.executor.backends.cuda.ops.rope_kv import DEFAULT, HeadTransform
from quintet.executor.backends.cuda.tables import StepRows


def gated_reference(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return ``gate(first half) * second half`` of each row; the gate is rounded to the dtype."""
    gates, ups = x.chunk(2, dim=-1)
    if gate is Gate.SILU:
        return F.silu(gates).mul_(ups)
    return F.gelu(gates, approximate="tanh" if gate is Gate.GELU_TANH else "none").mul_(ups)


def all_reduce_reference(parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the result of every rank: a tree sum in fp32, adjacent ranks first, plus the bias; rounded once."""
    sums = [part.float() for part in parts]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    total = sums[0] if bias is None else sums[0] + bias.float()
    return total.to(parts[0].dtype)


def copy_blocks_reference(
    source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy block by block, in order."""
    for old, new in pairs:
        for from_place, to_place in zip(source, target, strict=True):
            to_place[new] = from_place[old]


def grouped_matmul_reference(
    x: torch.Tensor,
    ends: torch.Tensor,
    weight_of: Callable[[int], torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return `grouped_matmul` or `coded_grouped_matmul`, group by group.

    weight_of: returns a group's weight ``[columns, depth]`` in fp32.
    """
    begin, parts = 0, []
    for group, end in enumerate(ends.tolist()):
        y = x[begin:end].float() @ weight_of(group).t()
        parts.append((y if bias is None else y + bias[group].float()).to(x.dtype))
        begin = end
    return torch.cat(parts)


def paged_attention_reference(
    q: torch.Tensor,
    kv: Planes,
    rows: StepRows,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Return `quintet.executor.backends.cuda.ops.attention.paged_attention` in fp32, with zeros for padding tokens."""
    num_heads, (_, kv_heads, _, value_dim) = q.shape[1], kv[1].shape
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
    for row, slot in enumerate(rows.slots.tolist()):
        start, count, first = (int(column[row]) for column in (rows.starts, rows.counts, rows.offsets))
        length = start + count
        if slot < 0 or count == 0:
            continue
        blocks = rows.block_table[slot, : -(-length // rows.block_size)].long()
        keys, values = (
            plane[blocks].float().transpose(1, 2).flatten(0, 1)[:length]
            .repeat_interleave(num_heads // kv_heads, dim=1)
            for plane in kv
        )  # [length, num_heads, head_dim]  # fmt: skip
        queries = q[first : first + count].float()
        logits = torch.einsum("thd,phd->htp", queries, keys) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        own = torch.arange(start, length, device=q.device)[:, None]
        distance = torch.arange(length, device=q.device)[None, :] - own  # [count, length]
        if alibi is not None:
            logits = logits + alibi[:, None, None] * distance
        visible = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
        if chunk is not None:
            keys_of, own_chunk = torch.arange(length, device=q.device) // chunk, own // chunk
            visible = visible & (keys_of >= own_chunk)
        logits = logits.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks[:, None, None].expand(-1, count, 1)), -1)
        weights = logits.softmax(-1)[..., :length]
        out[first : first + count] = torch.einsum("htp,phd->thd", weights, values) * value_scale
    return out


def rope_kv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv: Planes,
    rows: StepRows,
    transform: HeadTransform = DEFAULT,
) -> torch.Tensor:
    """Return the queries and write ``kv`` as `rope_kv` does, with torch."""
    assert rows.kv_rows is not None
    if transform.q_norm is not None and transform.k_norm is not None:
        q = rms_norm(q, transform.q_norm, transform.eps, transform.norm_offset)
        k = rms_norm(k, transform.k_norm, transform.eps, transform.norm_offset)
    if cos is not None and sin is not None:
        angles = (part.view(len(q), 1, cos.shape[-1]) for part in (cos, sin))
        cos, sin = angles
        q, k = (rope(heads, cos, sin, transform.rotary_first, transform.interleaved) for heads in (q, k))
    if transform.temperature is not None:
        q = (q * temperatures(transform.temperature, rows.positions.clamp(min=0))[:, None, None]).to(q.dtype)
    block_size = kv[0].shape[2]
    real = (rows.kv_rows >= 0).nonzero().squeeze(1)
    at = rows.kv_rows[real].long()
    for plane, heads, scale in zip(kv, (k, v), transform.kv_scales, strict=True):
        is_fp8 = plane.dtype == torch.float8_e4m3fn
        bits = torch.uint8 if is_fp8 else plane.dtype  # torch does not index fp8
        # torch converts out-of-range values to NaN
        written = (heads[real].float() / scale).clamp(-FP8_MAX, FP8_MAX) if is_fp8 else heads[real]
        plane.view(bits)[at // block_size, :, at % block_size] = written.to(plane.dtype).view(bits)
    return torch.where((rows.kv_rows >= 0)[:, None, None], q, torch.zeros_like(q))
