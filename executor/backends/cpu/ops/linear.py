"""Linear layers: torch reference."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.activation import ACTIVATION_CODES, activate
from quintet.executor.model_config.spec import Activation

WIDENED_ROWS = 4096
"""Weight rows converted to float32 at a time; a whole output layer in float32 takes gigabytes."""


class GatedActivation(IntEnum):
    """Gated activation of a layer's result; codes of ``csrc/cpu``."""

    NONE = 0
    SILU_AND_MUL = 1
    """``silu(gate) * up``: gates are the first half of the columns, ups the second; the result is half as wide."""
    GELU_TANH_AND_MUL = 2
    GELU_AND_MUL = 3
    RELU_AND_MUL = 4
    RELU2_AND_MUL = 5
    QUICK_GELU_AND_MUL = 6
    SIGMOID_AND_MUL = 7
    CLAMPED_SWIGLU = 32
    """Only for experts: see `quintet.executor.backends.cpu.ops.experts.gated`."""

    @classmethod
    def of(cls, kind: Activation) -> GatedActivation:
        """Return the gated form of an activation."""
        return cls(ACTIVATION_CODES[kind])

    @property
    def kind(self) -> Activation:
        """Activation of the gates; undefined for `NONE` and `CLAMPED_SWIGLU`."""
        return next(kind for kind, code in ACTIVATION_CODES.items() if code == self)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: GatedActivation = GatedActivation.NONE,
    result_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``activation(x @ weight.T + bias)``.

    x: ``[num_tokens, in]``; weight: ``[out, in]``, same dtype; bias: ``[out]``. result_dtype: float32 for unrounded sums, only
    without activation; None: that of x.
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
    """Return ``x @ weight.T + bias`` in float32 for 16-bit operands; their products are exact in float32."""
    if x.device.type == "cuda":
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        wide = x.float()
        y = torch.cat([wide @ rows.float().t() for rows in weight.split(WIDENED_ROWS)], dim=1)
    return y if bias is None else y.add_(bias)
