"""The seam between a linear layer of a model and whoever owns its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.ops.linear import GatedActivation
from quintet.executor.ops.packed_weight import PackedWeight
from quintet.executor.weights.plan import WeightPlan


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stacked layer that a checkpoint holds under a name of their own."""

    name: str
    """Without ``.weight`` or ``.bias``."""
    rows: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a model says about one of its linear layers."""

    parts: Sequence[Part]
    """Stacked in this order."""
    depth: int
    """Width of the input."""
    biased: bool = False
    activation: GatedActivation = GatedActivation.NONE
    is_output_layer: bool = False
    """Whether the result is the logits."""

    @property
    def columns(self) -> int:
        """Rows of all parts: the width of the product, before the activation."""
        return sum(part.rows for part in self.parts)


class LinearMethod(Protocol):
    """Owns the tensors of one layer. Declares them in a plan when made, is filled by the loader, and then multiplies."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[columns]`` in the model's number format."""

    @property
    def packed(self) -> PackedWeight | None:
        """The weight in the form of the host library; None where torch multiplies."""

    @property
    def table(self) -> torch.Tensor | None:
        """The weight row-major in the model's number format ``[columns, depth]``, where it is held so."""

    @property
    def is_quantized(self) -> bool:
        """Whether the weight's numbers are others than the checkpoint's."""

    @property
    def int8_activations(self) -> bool:
        """Whether inputs are quantized too, each token by its own scale."""

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return ``residual + activation(x @ weight.T + bias)``; x: ``[num_tokens, depth]``.

        Rounds to x's number format after the bias, after each half of the activation and after the residual.
        """


class Quantization(Protocol):
    """Makes the methods of one model."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """Return the owner of a layer's tensors, which it declares in ``plan``."""
