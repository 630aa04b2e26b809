"""Linear layers: all the multiplications of a model outside attention."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F


class GatedActivation(IntEnum):
    """What happens to a layer's result before it leaves; the codes are those of ``csrc/cpu``."""

    NONE = 0
    SILU_AND_MUL = 1
    """The first half of the columns are gates, the second ups; the result is ``silu(gate) * up``, half as wide."""
    GELU_TANH_AND_MUL = 2
    CLAMPED_SWIGLU = 32
    """Of experts alone: see `quintet.executor.ops.experts.gated`."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: GatedActivation = GatedActivation.NONE,
) -> torch.Tensor:
    """Return ``activation(x @ weight.T + bias)``: the reference.

    x: ``[num_tokens, in]``; weight: ``[out, in]``, of the same dtype; bias: ``[out]``.
    """
    y = F.linear(x, weight, bias)
    if activation is not GatedActivation.NONE:
        gate, up = y.chunk(2, dim=-1)
        silu = activation is GatedActivation.SILU_AND_MUL
        y = (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")).mul_(up)
    return y
