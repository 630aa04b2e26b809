"""State space scan of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024, equation 1 with scalar-identity A).

Computed token by token: sums by chunks would depend on the division of a request into steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.state_rows import Scanned, StateRows, keep_where


def head_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    dt_limits: tuple[float, float],
) -> torch.Tensor:
    """Return ``(c · state + skip * x) * silu(gate)`` where ``state = exp(d a) state + b (d x)``, ``d = softplus(dt + dt_bias)``.

    x, gate: ``[T, heads * head_dim]``; dt: ``[T, heads]``; b, c: ``[T, groups * state_size]``, each group shared by
    ``heads / groups`` heads; a, dt_bias, skip: ``[heads]``; dt_limits: bounds of d; states: ``[num_blocks, heads, state_size,
    head_dim]``, overwritten. Parameters, states and arithmetic: float32.
    """
    _, heads, state_size, head_dim = states.shape
    shared_by = heads * state_size // b.shape[1]
    state = rows.load(states)
    scanned = Scanned(x)

    def of_heads(groups: torch.Tensor) -> torch.Tensor:
        return groups.float().view(len(groups), -1, state_size).repeat_interleave(shared_by, 1)[..., None]

    for tokens, active in rows.steps():
        inputs = x[tokens].float().view(-1, heads, head_dim)
        width = F.softplus(dt[tokens].float() + dt_bias).clamp(*dt_limits)[..., None]  # [R, heads, 1]
        decayed = state * torch.exp(width * a[:, None])[..., None]
        state = keep_where(active, decayed + of_heads(b[tokens]) * (width * inputs)[:, :, None], state)
        y = (state * of_heads(c[tokens])).sum(2) + skip[:, None] * inputs
        if gate is not None:
            y = y * F.silu(gate[tokens].float()).view(-1, heads, head_dim)
        scanned.put(tokens, active, y)
    rows.save(states, state)
    return scanned.lines
