"""Activation functions: torch reference, and their codes in ``csrc/cpu``."""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F

from quintet.executor.model_config.spec import Activation

ACTIVATION_CODES = {
    Activation.SILU: 1,
    Activation.GELU_TANH: 2,
    Activation.GELU: 3,
    Activation.RELU: 4,
    Activation.RELU2: 5,
    Activation.QUICK_GELU: 6,
    Activation.SIGMOID: 7,
}
"""Codes of ``csrc/cpu/runtime/work.hpp``."""


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Apply the activation elementwise; the result has the dtype of ``x``."""
    match kind:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return F.relu(x)
        case Activation.RELU2:
            return F.relu(x).square()
        case Activation.QUICK_GELU:
            return x * torch.sigmoid(1.702 * x)
        case Activation.SIGMOID:
            return torch.sigmoid(x)
        case _:
            assert_never(kind)


def clipped(x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """Clamp ``x``. Unlike `torch.clamp`, the bounds need not be representable in its dtype."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide.clamp(least, most).to(x.dtype)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Apply xIELU elementwise in fp32, rounded once to the dtype of ``x``.

    Huang and Schlag, "Deriving activation functions using integration", 2024: ``p x² + l x`` above 0, ``n (e^min(x, m) - 1 - x) +
    l x`` below. numbers: fp32 ``[4]``: p, n - l, l, m.
    """
    p, n, linear, cap = numbers.unbind()
    wide = x if x.dtype is torch.float64 else x.float()
    below = (torch.expm1(torch.minimum(wide, cap)) - wide) * (n + linear)
    return torch.where(wide > 0, p * wide * wide, below).add(linear * wide).to(x.dtype)
