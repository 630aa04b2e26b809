"""Gated delta rule (Yang, Kautz and Hatamizadeh, "Gated delta networks", 2024, equation 10).

Computed token by token rather than by chunks; see `head_scan` for the reason.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.state_rows import Scanned, StateRows, keep_where


def delta_rule(
    rows: StateRows,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """Return ``state · q / sqrt(key_dim)`` after ``state = decay state + k (v - (decay state) · k) sigmoid(beta)``.

    ``decay = exp(a softplus(alpha + dt_bias))``; q and k are normalised to unit length. q, k: ``[T, key_heads * key_dim]``, each
    head shared by ``heads / key_heads`` value heads; v: ``[T, heads * head_dim]``; alpha, beta: ``[T, heads]``; a, dt_bias:
    ``[heads]``; states: ``[num_blocks, heads, key_dim, head_dim]``, overwritten. Parameters, states and arithmetic: float32.
    """
    _, heads, key_dim, head_dim = states.shape
    shared_by = heads * key_dim // k.shape[1]
    state = rows.load(states)
    scanned = Scanned(v)

    def unit_length(vectors: torch.Tensor) -> torch.Tensor:
        heads_of_keys = vectors.float().view(len(vectors), -1, key_dim)
        length = torch.rsqrt(heads_of_keys.square().sum(-1, keepdim=True) + 1e-6)
        return (heads_of_keys * length).repeat_interleave(shared_by, 1)[..., None]  # [R, heads, key_dim, 1]

    for tokens, active in rows.steps():
        decay = torch.exp(a * F.softplus(alpha[tokens].float() + dt_bias))
        key, decayed = unit_length(k[tokens]), state * decay[..., None, None]
        values = v[tokens].float().view(-1, heads, head_dim)
        delta = (values - (decayed * key).sum(2)) * torch.sigmoid(beta[tokens].float())[..., None]
        state = keep_where(active, decayed + key * delta[:, :, None], state)
        scanned.put(tokens, active, (state * unit_length(q[tokens])).sum(2) * key_dim**-0.5)
    rows.save(states, state)
    return scanned.lines
