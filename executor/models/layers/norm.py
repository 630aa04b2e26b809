"""A norm of a model: group width, kind, scale and bias.

RMS norm: Zhang and Sennrich, "Root mean square layer normalization", 2019. Layer norm: Ba, Kiros and Hinton, "Layer
normalization", 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.rms_norm import rms_norm
from quintet.executor.model_config.spec import NormKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """``x / deviation * (offset + weight) + bias`` of each group of ``width`` elements of a row."""

    kind: NormKind
    width: int
    """Elements normed together. A wider value is normed group by group, for example per head."""
    eps: float
    weight: torch.Tensor | None = None
    """``[width]``, common to all groups, or as long as the value; None for ones."""
    bias: torch.Tensor | None = None
    """Layer norm only: as long as the weight; None for zeros."""
    offset: float = 0.0
    """Added to an RMS norm's weight (Gemma: 1)."""
    rounds_once: bool = False
    """RMS norm only: round the product with the weight, as with an offset, instead of the quotient.
    """

    def __post_init__(self) -> None:
        allowed = self.bias is None if self.kind is NormKind.RMS else self.offset == 0.0
        assert allowed, "an RMS norm has no bias, a layer norm no offset"

    def groups(self, width: int) -> int:
        """Return the number of groups in a value of ``width`` elements; check the lengths of weight and bias."""
        count, rest = divmod(width, self.width)
        assert count > 0 and rest == 0, f"a norm of {self.width} numbers of a value of {width}"
        for vector in (self.weight, self.bias):
            allowed = vector is None or (vector.shape in ((self.width,), (width,)) and vector.is_contiguous())
            assert allowed, f"a norm's weight {vector.shape}, of a value of {width}"  # type: ignore[union-attr]
        return count

    @property
    def is_per_group(self) -> bool:
        """True if each group has separate weights."""
        return any(v is not None and v.numel() != self.width for v in (self.weight, self.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [..., width]`` normed, computed with torch: the reference."""
        grouped = x.unflatten(-1, (self.groups(x.shape[-1]), self.width))
        weight, bias = (None if v is None else v.view(-1, self.width) for v in (self.weight, self.bias))
        if self.kind is NormKind.RMS:
            return rms_norm(grouped, weight, self.eps, self.offset, self.rounds_once).flatten(-2)
        wide = F.layer_norm(grouped.float(), (self.width,), eps=self.eps)
        wide = wide if weight is None else wide * weight.float()
        wide = wide if bias is None else wide + bias.float()
        return wide.to(x.dtype).flatten(-2)
