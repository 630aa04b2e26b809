"""Reference of paged attention: one row at a time, with dense fp32 matrices.

Only for tests: it reads values on the host, which synchronizes the stream.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows


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
