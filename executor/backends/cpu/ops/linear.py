"""Linear layers: all the multiplications of a model outside attention."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.activation import ACTIVATION_CODES, activate
from quintet.executor.model_config.spec import Activation

WIDENED_ROWS = 4096
"""Of a weight, converted to float32 at a time: a whole output layer in float32 is gigabytes."""


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
    """Of experts alone: see `quintet.executor.backends.cpu.ops.experts.gated`."""

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
    result_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``activation(x @ weight.T + bias)``: the reference.

    x: ``[num_tokens, in]``; weight: ``[out, in]``, of the same dtype; bias: ``[out]``. result_dtype: float32 for sums that are
    not rounded, without an activation; None: that of x.
    """
    if result_dtype not in (None, x.dtype):
        assert activation is GatedActivation.NONE and result_dtype is torch.float32, (
            activation,
            result_dtype,
        )
        return _linear_in_float32(x, weight, bias)
    y = F.linear(x, weight, bias)
    if activation is not GatedActivation.NONE:
        gate, up = y.chunk(2, dim=-1)
        return activate(gate, activation.kind) * up
    return y


def _linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in float32, of 16-bit operands whose products are exact in float32."""
    if x.device.type == "cuda":
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        wide = x.float()
        y = torch.cat([wide @ rows.float().t() for rows in weight.split(WIDENED_ROWS)], dim=1)
    return y if bias is None else y.add_(bias)
