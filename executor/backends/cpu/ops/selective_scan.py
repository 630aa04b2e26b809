"""Selective state space scan of Mamba, computed token by token.

Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023), section 3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.state_rows import Scanned, StateRows, keep_where


def selective_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
) -> torch.Tensor:
    """Return ``(state · c + skip * x) * silu(gate)`` where ``state = exp(d a) state + d x b``, ``d = softplus(dt + dt_bias)``.

    x, dt, gate: ``[T, channels]``; b, c: ``[T, state_size]``; a: ``[state_size, channels]``; dt_bias, skip: ``[channels]``;
    states: ``[num_blocks, state_size, channels]``, overwritten. Parameters, states and arithmetic: float32.
    """
    state = rows.load(states)
    scanned = Scanned(x)
    for tokens, active in rows.steps():
        inputs = x[tokens].float()  # [R, channels]
        width = F.softplus(dt[tokens].float() + dt_bias)
        added = (width * inputs)[:, None] * b[tokens].float()[:, :, None]
        state = keep_where(active, state * torch.exp(width[:, None] * a) + added, state)
        y = (state * c[tokens].float()[:, :, None]).sum(1) + skip * inputs
        scanned.put(tokens, active, y * F.silu(gate[tokens].float()))
    rows.save(states, state)
    return scanned.lines
