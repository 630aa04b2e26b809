"""Causal attention of new tokens over the paged cache, prefill and decode alike.

KV layout of a layer: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, blocks at any distance. A block is one
contiguous piece, to be copied or shipped; and so is a head within it, to be read by one thread.

Rows that bring equally many tokens are computed together (`AttentionGroup`): their blocks are gathered into
``[rows * kv_heads, context, head_dim]`` and multiplied, query heads of one KV head folded into the matrix, so that no
key is repeated for grouped queries (Ainslie et al., "GQA", 2023). Rows of many tokens go through torch's fused kernel,
which never holds the whole score matrix (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

MAX_FOLDED_TOKENS = 8
"""Rows of more tokens than this use the fused kernel."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that are computed in one go. ``B`` rows of ``c`` new tokens over at most ``L`` keys.

    ::

        keys of a row   |--- cached ---|-- new (c) --|.. padding ..|
                        0            start     start + c           L
    """

    num_rows: int
    num_new: int
    tokens: torch.Tensor | None
    """int64[B * c]: the group's tokens among the step's; None when they are all of them, in order."""
    blocks: torch.Tensor
    """int64[B, 1, blocks]: where the rows' keys and values are."""
    mask: torch.Tensor | None
    """bool[B, 1, c, L], True where a query sees a key; None when plainly causal from position 0 (then ``L`` is cut to ``c``)."""
    bias: torch.Tensor | None
    """The mask as 0 and -inf ``[B * kv_heads, 1, L]`` or ``[B * kv_heads, groups * c, L]`` for the folded form; else None."""


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, groups: tuple[AttentionGroup, ...], scale: float
) -> torch.Tensor:
    """Return attention outputs ``[num_tokens, num_heads, head_dim]``.

    q: ``[num_tokens, num_heads, head_dim]``; kv: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, in which
    the new tokens' keys and values were written already.
    """
    out = torch.empty_like(q)
    for group in groups:
        if group.tokens is None:
            return _attend(q, kv, group, scale)
        out[group.tokens] = _attend(q[group.tokens], kv, group, scale)
    return out


def _attend(q: torch.Tensor, kv: torch.Tensor, group: AttentionGroup, scale: float) -> torch.Tensor:
    """Return the outputs of a group's own tokens ``q [B * c, num_heads, head_dim]``."""
    _, _, kv_heads, _, head_dim = kv.shape
    heads = torch.arange(kv_heads, device=kv.device)[:, None]  # [kv_heads, 1]
    shape = (group.num_rows, kv_heads, -1, head_dim)
    keys = kv[group.blocks, 0, heads].view(shape)
    values = kv[group.blocks, 1, heads].view(shape)
    if group.bias is not None:
        return _folded(q, keys, values, group.num_new, group.bias, scale)
    return _fused(q, keys, values, group.num_new, group.mask, scale)


def _folded(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_new: int, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Two matrix products and a softmax over ``[B * kv_heads, groups * c, L]`` scores."""
    rows, kv_heads, context, head_dim = keys.shape
    fold = q.shape[1] // kv_heads
    folded = q.reshape(rows, num_new, kv_heads, fold, head_dim)
    if num_new > 1:
        folded = folded.permute(0, 2, 3, 1, 4)  # [B, kv_heads, groups, c, head_dim]
    folded = folded.reshape(rows * kv_heads, fold * num_new, head_dim)
    keys, values = keys.view(-1, context, head_dim), values.view(-1, context, head_dim)
    scores = torch.baddbmm(bias, folded, keys.transpose(1, 2), alpha=scale)  # [B * kv_heads, groups * c, L]
    out = torch.bmm(torch.softmax(scores, dim=-1), values)
    if num_new > 1:
        out = out.view(rows, kv_heads, fold, num_new, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * num_new, kv_heads * fold, head_dim)


def _fused(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_new: int,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    rows, heads, head_dim = keys.shape[0], q.shape[1], q.shape[2]
    folded = q.view(rows, num_new, heads, head_dim).transpose(1, 2)  # [B, heads, c, head_dim]
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
    return out.transpose(1, 2).reshape(rows * num_new, heads, head_dim)
