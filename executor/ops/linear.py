"""Linear layers: all the multiplications of a model outside attention."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F

from quintet.executor.cards.spec import Activation
from quintet.executor.ops.activation import ACTIVATION_CODES, activate


class GatedActivation(IntEnum):
    """What happens to a layer's result before it leaves; the codes are those of ``csrc/cpu``."""

    NONE = 0
    SILU_AND_MUL = 1
    """The first half of the columns are gates, the second ups; the result is ``silu(gate) * up``, half as wide."""
    GELU_TANH_AND_MUL = 2
    GELU_AND_MUL = 3
    RELU_AND_MUL = 4
    RELU2_AND_MUL = 5
    QUICK_GELU_AND_MUL = 6
    SIGMOID_AND_MUL = 7
    CLAMPED_SWIGLU = 32
    """Of experts alone: see `quintet.executor.ops.experts.gated`."""

    @classmethod
    def of(cls, kind: Activation) -> GatedActivation:
        """Return the one whose gates are activated so."""
        return cls(ACTIVATION_CODES[kind])

    @property
    def kind(self) -> Activation:
        """What the gates go through. Not of `NONE`, nor of `CLAMPED_SWIGLU`."""
        return next(kind for kind, code in ACTIVATION_CODES.items() if code == self)


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
        return activate(gate, activation.kind) * up
    return y
