"""The gate of a SwiGLU feed-forward (Shazeer, "GLU variants improve transformer", 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``gate_up [num_tokens, 2 * width]``: ``[num_tokens, width]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
