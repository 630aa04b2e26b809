"""Rounders of linear layers during calibration; each layer sees the inputs of the layers rounded before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.checkpoints.quantize_tool.awq import AwqRounded, factors_of, in_words, narrowed
from quintet.executor.checkpoints.quantize_tool.layers import Maker
from quintet.executor.checkpoints.quantize_tool.rounding import Rounded, gptq
from quintet.executor.checkpoints.quantize_tool.targets import Target


class Rounder(Protocol):
    """Rounds weights and keeps the results by checkpoint weight name."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the rounded values of weights ``[rows, depth]`` with the same inputs. Raises ValueError.

        hessian: products of the inputs, fp32 ``[depth, depth]``.
        """


class GptqRounder:
    """A `Rounder`."""

    def __init__(self, target: Target, scale_dtype: torch.dtype) -> None:
        self._target, self._scale_dtype = target, scale_dtype
        self.found: dict[str, Rounded] = {}

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `Rounder`."""
        for name, weight in zip(names, weights, strict=True):
            self.found[name] = gptq(weight, hessian, self._target, self._scale_dtype)
        return [self.found[name].numbers for name in names]


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
    """A `Rounder`."""

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        """makers: see `quintet.executor.checkpoints.quantize_tool.layers.Layers.makers`."""
        self._makers = makers
        self.found: dict[str, AwqRounded] = {}
        self.divided: dict[str, Division] = {}
        """Keyed by names of norm weights and biases, which need not exist."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `Rounder`."""
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


def tensors_of(made: AwqRounded) -> dict[str, torch.Tensor]:
    """Return a layer's checkpoint tensors by name suffix."""
    return {
        "qweight": in_words(made.codes),
        "qzeros": in_words(made.zeros),
        "scales": made.scales.t().contiguous(),
    }
