"""Root mean square normalisation (Zhang and Sennrich, "Root mean square layer normalization", 2019)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, the mean in fp32.

    x: ``[..., width]``; weight: ``[width]`` or anything that broadcasts against ``x``, of the same dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight
