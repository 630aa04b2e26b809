"""Rotate queries and keys by their positions, and store keys and values in the paged cache.

Rotary position embedding: Su et al., "RoFormer", 2021, section 3.4.2, in the layout of the Llama checkpoints: dimension
``i`` is paired with ``i + rotary_dim / 2``.
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rotated. x: ``[num_tokens, heads, head_dim]``; cos, sin: ``[num_tokens, 1, rotary_dim]``, same dtype.

    Dimensions past ``rotary_dim`` pass through.
    """
    rotary_dim = cos.shape[-1]
    rotating = x[..., :rotary_dim]
    first, second = rotating.chunk(2, dim=-1)
    rotated = torch.cat((second.neg(), first), dim=-1).mul_(sin).addcmul_(rotating, cos)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def rope_kv_write(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    write_index: torch.Tensor,
) -> torch.Tensor:
    """Return the rotated queries ``[num_tokens, num_heads, head_dim]`` and write keys and values into ``kv``.

    qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``; kv: ``[2, num_blocks, num_kv_heads, block_size,
    head_dim]``; write_index: ``[num_tokens * num_kv_heads]`` int64, the row of each key in ``kv[0]`` seen as
    ``[-1, head_dim]``.
    """
    head_dim = qkv.shape[-1]
    rotated = rope(qkv[:, : num_heads + num_kv_heads], cos, sin)
    rows = kv.view(2, -1, head_dim)
    rows[0].index_copy_(0, write_index, rotated[:, num_heads:].reshape(-1, head_dim))
    rows[1].index_copy_(0, write_index, qkv[:, num_heads + num_kv_heads :].reshape(-1, head_dim))
    return rotated[:, :num_heads]
