"""Linear layers: all the multiplications of a model outside attention.

A weight is packed once, when it is loaded, into whatever form the implementation multiplies fastest; what packing
returns is the function that the model then calls.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
import torch.nn.functional as F

LinearFunction = Callable[[torch.Tensor], torch.Tensor]
"""``x [num_tokens, in] -> x @ weight.T + bias [num_tokens, out]``."""


class Activation(IntEnum):
    """What happens to a layer's result before it leaves; the codes are those of ``csrc/cpu``."""

    NONE = 0
    SILU_AND_MUL = 1
    """The first half of the columns are gates, the second ups; the result is ``silu(gate) * up``, half as wide."""
    GELU_TANH_AND_MUL = 2


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation = Activation.NONE,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``residual + activation(x @ weight.T + bias)``: the reference.

    x: ``[num_tokens, in]``; weight: ``[out, in]``, of the same dtype; bias: ``[out]``; residual: as wide as the result.
    """
    y = F.linear(x, weight, bias)
    if activation is not Activation.NONE:
        gate, up = y.chunk(2, dim=-1)
        silu = activation is Activation.SILU_AND_MUL
        y = (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")).mul_(up)
    return y if residual is None else residual + y


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction:
    """Return the layer of ``weight [out, in]`` and ``bias [out]``, which it keeps as they are."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return apply


def pack_linear_on_host(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction:
    """Return the layer with its weight in oneDNN's blocked layout, copied: the caller may let go of ``weight``.

    Unpacked, oneDNN reorders the weight in every call: half of the time of a decode step with few rows. The values
    are those of the reference for bf16. Dtypes that this processor has no packed kernels for stay as they are.
    """
    if not _packs(weight.dtype):
        return pack_linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return y

    return apply


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32
