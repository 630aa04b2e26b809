"""AWQ: large inputs get more quantization steps; their columns are multiplied, and the producer of the inputs is
divided.

J. Lin, J. Tang, H. Tang, S. Yang, W.-M. Chen, W.-C. Wang, G. Xiao, X. Dang, C. Gan, S. Han, "AWQ: Activation-aware
weight quantization for LLM compression and acceleration", MLSys 2024 (arXiv 2306.00978), section 3.2. Factors are a
power of the inputs' size, the best of 20 powers; then ranges of groups are narrowed if that reduces the error. Here
the size is the root mean square, and errors of inputs count as independent: only the sum of squares is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quintet.executor.checkpoints.quantize_tool.layers import Maker

GROUP = 128
MOST_CODE = 15
_POWERS = 20
_NARROWED = 10
_NARROWEST = 0.5
_IN_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row of each position in a word."""


@dataclass(slots=True)
class AwqRounded:
    """A quantized weight: ``(codes - zeros) * scales`` of their groups."""

    codes: torch.Tensor
    """uint8 ``[rows, depth]``."""
    scales: torch.Tensor
    """fp16 ``[rows, groups]``."""
    zeros: torch.Tensor
    """uint8 ``[rows, groups]``."""

    @property
    def numbers(self) -> torch.Tensor:
        """Dequantized weight, fp32 ``[rows, depth]``."""
        grouped: torch.Tensor = self.codes.unflatten(1, (-1, GROUP)).float() - self.zeros[..., None].float()
        return (grouped * self.scales.float()[..., None]).flatten(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's checkpoint tensors by name suffix."""
        return {
            "qweight": in_words(self.codes),
            "qzeros": in_words(self.zeros),
            "scales": self.scales.t().contiguous(),
        }


def factors_of(weights: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
    """Return the factors of the columns of weights fp32 ``[rows, depth]`` with the same inputs: fp32 ``[depth]``.

    squares: sums of squared inputs, fp32 ``[depth]``.
    """
    sizes = squares.clamp(min=1e-12).sqrt()
    least, found = float("inf"), torch.ones_like(squares)
    for power in range(_POWERS):
        factors = sizes ** (power / _POWERS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        factors = factors.clamp(1e-4, 1e4)
        lost = sum(
            float((((rounded(each * factors).numbers / factors) - each).square() * squares).sum())
            for each in weights
        )
        if lost < least:
            least, found = lost, factors
    return found


def rounded(weight: torch.Tensor) -> AwqRounded:
    """Quantize a weight fp32 ``[rows, depth]`` to the nearest codes of its groups' full ranges."""
    grouped = weight.unflatten(1, (-1, GROUP))
    return _rounded(grouped, grouped.amin(2), grouped.amax(2))


def narrowed(weight: torch.Tensor, squares: torch.Tensor) -> AwqRounded:
    """Quantize with the group ranges that lose least, weighted by squared inputs fp32 ``[depth]``."""
    if not weight.isfinite().all():
        raise ValueError("has values that are not finite")
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2), grouped.amax(2)
    counts = squares.unflatten(0, (-1, GROUP))
    share = torch.ones_like(low)
    least = torch.full_like(low, torch.inf)
    for step in range(_NARROWED):
        part = 1.0 - (1.0 - _NARROWEST) * step / _NARROWED
        numbers = _rounded(grouped, low * part, high * part).numbers.unflatten(1, (-1, GROUP))
        lost = ((numbers - grouped).square() * counts).sum(2)
        share = torch.where(lost < least, part, share)
        least = torch.minimum(lost, least)
    return _rounded(grouped, low * share, high * share)


def _rounded(grouped: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> AwqRounded:
    """Quantize values ``[rows, groups, GROUP]`` with ranges ``[rows, groups]``, widened to contain zero."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scales = ((high - low) / MOST_CODE).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, MOST_CODE)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp_(0, MOST_CODE)
    return AwqRounded(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8))


def in_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 ``[rows, columns]`` into AutoAWQ's ``gemm`` words, int32 ``[columns, rows / 8]``."""
    placed = codes.t().unflatten(1, (-1, len(_IN_WORD)))[..., list(_IN_WORD)].to(torch.int32)
    words = torch.zeros(placed.shape[:2], dtype=torch.int32)
    for place in range(len(_IN_WORD)):
        words |= placed[..., place] << (4 * place)
    return words


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a norm's weight or a bias by AWQ factors."""

    factors: torch.Tensor
    """Divisor, fp32 ``[depth]``."""
    offset: float = 0.0
    """Constant added before the division and subtracted afterwards."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the divided tensor in its number format."""
        return ((tensor.float() + self.offset) / self.factors - self.offset).to(tensor.dtype)


class AwqRounder:
    """A `quintet.executor.checkpoints.quantize_tool.calibrate.Rounder`."""

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        """makers: see `quintet.executor.checkpoints.quantize_tool.layers.Layers.makers`."""
        self._makers = makers
        self.found: dict[str, AwqRounded] = {}
        self.divided: dict[str, Division] = {}
        """Keyed by names of norm weights and biases, which need not exist."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        floats, squares = [each.float() for each in weights], hessian.diagonal()
        maker, factors = self._makers.get(names[0]), torch.ones(len(squares))
        if maker is not None:
            factors = factors_of(floats, squares)
            self._divide(maker, factors)
        for name, each in zip(names, floats, strict=True):
            self.found[name] = narrowed(each * factors, squares / factors.square())
        return [self.found[name].numbers / factors for name in names]

    def _divide(self, maker: Maker, factors: torch.Tensor) -> None:
        layer = self.found.get(f"{maker.name}.weight")
        if layer is None:
            self.divided[f"{maker.name}.weight"] = Division(factors, maker.offset)
        else:  # the scales of its outputs
            factors = torch.cat([torch.ones(maker.first_row), factors])
            layer.scales = (layer.scales.float() / factors[:, None]).half()
        self.divided[f"{maker.name}.bias"] = Division(factors)
