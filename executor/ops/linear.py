"""Linear layers: all the multiplications of a model outside attention.

A weight is packed once, when it is loaded, into whatever form the implementation multiplies fastest; what packing
returns is the function that the model then calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

LinearFunction = Callable[[torch.Tensor], torch.Tensor]
"""``x [num_tokens, in] -> x @ weight.T + bias [num_tokens, out]``."""


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
