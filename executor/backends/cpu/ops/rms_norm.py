"""Root mean square normalisation (Zhang and Sennrich, "Root mean square layer normalization", 2019)."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; the quotient is rounded before the product.

    With ``offset`` (Gemma) or ``rounds_once``, the factor is ``offset + weight`` and all arithmetic is in fp32. x:
    ``[..., width]``; weight: same dtype, ``[width]`` or a shape that broadcasts against ``x``; None for ones.
    """
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    if weight is None:
        return quotient.to(x.dtype)
    if offset or rounds_once:
        return (quotient * (offset + weight.float())).to(x.dtype)
    return quotient.to(x.dtype) * weight
