"""Causal paged attention of prefill and decode: torch reference.

KV layout of a layer: keys ``[num_blocks, num_kv_heads, block_size, head_dim]``, values ``[..., value_width]``; blocks may be
strided. A head within a block is contiguous.

Rows with equal numbers of new tokens form an `AttentionBucket`. Short rows: blocks are gathered into
``[rows * kv_heads, context, head_dim]``, and the query heads of a KV head are folded into the matrix (Ainslie et al., "GQA",
2023). Long rows: torch's fused kernel, which never holds the whole score matrix (Dao et al., "FlashAttention", 2022). Scores
with softcap, ALiBi or sinks are computed in fp32, one KV head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quintet.executor.models.layers.attention import AttentionLayer

MAX_FOLDED_TOKENS = 8
"""Rows of more tokens than this use the fused kernel."""


@dataclass(frozen=True, slots=True)
class AttentionBucket:
    """Rows that are computed together: ``B`` rows of ``c`` new tokens over at most ``L`` keys.

    ::

        keys of a row   |--- cached ---|-- new (c) --|.. padding ..|
                        0            start     start + c           L
    """

    num_rows: int
    num_new: int
    tokens: torch.Tensor | None
    """int64[B * c]: the bucket's tokens among the step's; None: all tokens, in order."""
    blocks: torch.Tensor
    """int64[B, 1, blocks]: block table of the rows."""
    distance: torch.Tensor
    """int64[B]: position of the first key minus position of the first query."""
    mask: torch.Tensor | None
    """bool[B, 1, c, L], True if the query attends to the key; None: causal from position 0, with ``L`` cut to ``c``."""
    bias: torch.Tensor | None
    """Additive mask of the folded form, ``[B * kv_heads, 1, L]`` or ``[B * kv_heads, groups * c, L]``; None otherwise."""


def paged_attention(
    layer: AttentionLayer,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    buckets: tuple[AttentionBucket, ...],
) -> torch.Tensor:
    """Return attention outputs ``[num_tokens, num_heads, value_width]``.

    q: ``[num_tokens, num_heads, head_dim]``; keys, values: the cache, which already holds the new tokens. buckets: with the masks
    of the layer's window.
    """
    out = q.new_empty((*q.shape[:2], layer.value_width))
    for bucket in buckets:
        if bucket.tokens is None:
            return _attend(layer, q, keys, values, bucket)
        out[bucket.tokens] = _attend(layer, q[bucket.tokens], keys, values, bucket)
    return out


def _attend(
    layer: AttentionLayer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: AttentionBucket
) -> torch.Tensor:
    """Return the outputs of a bucket's tokens ``q [B * c, num_heads, head_dim]``."""
    heads = torch.arange(layer.num_kv_heads, device=q.device)[:, None]  # [kv_heads, 1]
    keys, values = (cache[bucket.blocks, heads].flatten(2, 3) for cache in (keys, values))
    if not layer.is_product:
        return _stepwise(layer, q, keys, values, bucket)
    # The bias has the head count of the first layer.
    if bucket.bias is not None and len(bucket.bias) == len(keys) * layer.num_kv_heads:
        return _folded(q, keys, values, bucket.num_new, bucket.bias, layer.scale)
    return _fused(q, keys, values, bucket.num_new, bucket.mask, layer.scale)


def _stepwise(
    layer: AttentionLayer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: AttentionBucket
) -> torch.Tensor:
    """Compute scores in fp32 with softcap, ALiBi and sinks, one KV head at a time."""
    rows, num_new, fold = bucket.num_rows, bucket.num_new, layer.num_heads // layer.num_kv_heads
    mask = bucket.mask
    if mask is None:
        keys, values = keys[:, :, :num_new], values[:, :, :num_new]
        mask = torch.ones(1, 1, num_new, num_new, dtype=torch.bool, device=q.device).tril()
    offset = torch.arange(keys.shape[2], device=q.device) - torch.arange(num_new, device=q.device)[:, None]
    distance = (bucket.distance[:, None, None] + offset).unsqueeze(1)  # [B, 1, c, L]
    queries = q.view(rows, num_new, layer.num_heads, -1).transpose(1, 2)  # [B, heads, c, head_dim]
    parts = []
    for kv_head in range(layer.num_kv_heads):
        heads = slice(kv_head * fold, (kv_head + 1) * fold)
        scores = queries[:, heads].float() @ keys[:, kv_head, None].float().transpose(2, 3) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.alibi_slopes is not None:
            scores = scores + layer.alibi_slopes[heads, None, None] * distance
        scores = scores.masked_fill(~mask, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks[heads, None, None].expand(rows, -1, num_new, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
        parts.append(weights @ values[:, kv_head, None])  # [B, groups, c, value_width]
    return torch.cat(parts, 1).transpose(1, 2).reshape(rows * num_new, layer.num_heads, -1)


def _folded(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_new: int, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention as two matrix products and a softmax over scores ``[B * kv_heads, groups * c, L]``."""
    rows, kv_heads, _, head_dim = keys.shape
    fold = q.shape[1] // kv_heads
    folded = q.reshape(rows, num_new, kv_heads, fold, head_dim)
    if num_new > 1:
        folded = folded.permute(0, 2, 3, 1, 4)  # [B, kv_heads, groups, c, head_dim]
    folded = folded.reshape(rows * kv_heads, fold * num_new, head_dim)
    scores = torch.baddbmm(
        bias, folded, keys.flatten(0, 1).transpose(1, 2), alpha=scale
    )  # [B * kv_heads, groups * c, L]
    out = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))
    if num_new > 1:
        out = out.view(rows, kv_heads, fold, num_new, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * num_new, kv_heads * fold, -1)


def _fused(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_new: int,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    rows, heads = keys.shape[0], q.shape[1]
    folded = q.view(rows, num_new, heads, -1).transpose(1, 2)  # [B, heads, c, head_dim]
    if mask is None:
        keys, values = keys[:, :, :num_new], values[:, :, :num_new]
    out = F.scaled_dot_product_attention(
        folded,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=heads != keys.shape[1],
    )
    return out.transpose(1, 2).reshape(rows * num_new, heads, -1)
