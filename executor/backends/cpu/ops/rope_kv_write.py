"""RoPE of queries and keys, and the write of keys and values to the paged cache.

Rotary position embedding: Su et al., "RoFormer", 2021, section 3.4.2. Two layouts of pairs: ``i`` with ``i + rotary_dim / 2``
(Llama), or interleaved, ``2 i`` with ``2 i + 1`` (GPT-J, and the paper).
"""

from __future__ import annotations

import torch

from quintet.executor.model_config.spec import Temperature
from quintet.executor.models.layers.attention import AttentionLayer


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int = 0, interleaved: bool = False
) -> torch.Tensor:
    """Rotate dimensions ``[first, first + rotary_dim)`` of each head; the others pass through.

    x: ``[num_tokens, heads, head_dim]``; cos, sin: ``[num_tokens, 1, rotary_dim]``, same dtype, both halves equal. interleaved:
    adjacent dimensions form pairs.
    """
    rotary_dim = cos.shape[-1]
    before, rotating, after = x.tensor_split((first, first + rotary_dim), -1)
    if interleaved:
        cos, sin = (part[..., : rotary_dim // 2].repeat_interleave(2, -1) for part in (cos, sin))
        pairs = rotating.unflatten(-1, (-1, 2))
        turned = torch.stack((pairs[..., 1].neg(), pairs[..., 0]), -1).flatten(-2)
    else:
        turned = torch.cat((rotating[..., rotary_dim // 2 :].neg(), rotating[..., : rotary_dim // 2]), -1)
    rotated = turned.mul_(sin).addcmul_(rotating, cos)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((before, rotated, after), -1)


def temperatures(temperature: Temperature, positions: torch.Tensor) -> torch.Tensor:
    """Return the fp32 query scale at each of ``positions``."""
    shifted = positions + temperature.shift
    periods = shifted // temperature.period if temperature.whole else shifted / temperature.period
    return 1.0 + temperature.growth * torch.log1p(periods.float().clamp(min=0))


def rope_kv_write(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Return rotated queries with norms after RoPE and temperature applied; write rotated keys and values to the cache.

    q: ``[num_tokens, num_heads, head_dim]``; k, v: ``[num_tokens, num_kv_heads, head_dim or value_width]``; rotation: cosines and
    sines, see `rope`; positions: int64``[num_tokens]``; keys, values: ``[num_blocks, num_kv_heads, block_size, head_dim or
    value_width]``; blocks, offsets: int64``[num_tokens]``, block and offset of each token. With ``layer.values_in_keys``,
    ``values`` is a view of ``keys``.
    """
    if rotation is not None:
        q, k = (rope(x, *rotation, layer.rotary_first, layer.interleaved) for x in (q, k))
    if layer.norms_after_rope and layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    keys[blocks, :, offsets] = k
    if not layer.values_in_keys:
        values[blocks, :, offsets] = v
    if layer.temperature is None:
        return q
    return (q * temperatures(layer.temperature, positions)[:, None, None]).to(q.dtype)
