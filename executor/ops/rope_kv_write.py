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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Return the rotated queries, and write rotated keys and values into ``kv``.

    q: ``[num_tokens, num_heads, head_dim]``; k, v: ``[num_tokens, num_kv_heads, head_dim]``; kv: ``[num_blocks, 2,
    num_kv_heads, block_size, head_dim]``; blocks, offsets: ``[num_tokens]`` int64, in which block a token's key and value
    stand, and where there.
    """
    kv[blocks, 0, :, offsets] = rope(k, cos, sin)
    kv[blocks, 1, :, offsets] = v
    return rope(q, cos, sin)
