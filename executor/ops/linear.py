"""A linear layer: all the multiplications of a model outside attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``. x: ``[num_tokens, in]``; weight: ``[out, in]``; bias: ``[out]``."""
    return F.linear(x, weight, bias)
