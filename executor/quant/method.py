"""The seam between a linear layer of a model and whoever owns its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from quintet.executor.ops.linear import GatedActivation
from quintet.executor.ops.packed_weight import PackedWeight
from quintet.executor.quant.stack import StackMethod, StackShape
from quintet.executor.weights.plan import Piece, WeightPlan


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stacked layer, and where a checkpoint has them: in a tensor of their own, or among others of a larger one.

    The larger one's rows are ``groups`` pieces of one height; of each piece these are the rows from ``begin`` on::

        q k v                     groups 1: all queries, all keys, all values
        qqq k v | qqq k v | ...   groups of one KV head each
    """

    name: str
    """The tensor's, without ``.weight`` or ``.bias``. Several parts may name one."""
    rows: int
    total: int | None = None
    """Rows of the tensor; None: these are all."""
    begin: int = 0
    groups: int = 1
    transposed: bool = False
    """Whether the weight is ``[depth, total]`` in the checkpoint."""
    unit_rows: bool = False
    """Whether each row of the weight is divided by its length."""

    def __post_init__(self) -> None:
        total = self.height
        assert total % self.groups == 0 == self.rows % self.groups, self
        assert 0 <= self.begin <= (total - self.rows) // self.groups, self

    @property
    def height(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.rows if self.total is None else self.total

    def weight_shape(self, depth: int) -> tuple[int, int]:
        """Return the checkpoint's shape of the weight."""
        return (depth, self.height) if self.transposed else (self.height, depth)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, depth]`` of the checkpoint's weight: a view of it, or a copy where rows of groups are gathered."""
        rows = self.bias(tensor.t() if self.transposed else tensor)
        return F.normalize(rows) if self.unit_rows else rows

    def bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor of ``height`` rows: ``[rows]`` of the bias."""
        if self.rows == self.height:
            return tensor
        in_groups = tensor.view(self.groups, -1, *tensor.shape[1:])
        return in_groups[:, self.begin : self.begin + self.rows // self.groups].flatten(0, 1)


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
    is_exact: bool = False
    """Whether the weight keeps the model's number format, however others are quantized: small differences of what it says
    decide, and it is small itself."""

    @property
    def columns(self) -> int:
        """Rows of all parts: the width of the product, before the activation."""
        return sum(part.rows for part in self.parts)

    @property
    def weights(self) -> list[Piece]:
        """Of the checkpoint, in the order of the parts."""
        return [
            Piece(f"{part.name}.weight", part.weight_shape(self.depth), part.rows, part.weight)
            for part in self.parts
        ]

    @property
    def biases(self) -> list[Piece]:
        """Of the checkpoint, likewise; where the layer is biased."""
        return [Piece(f"{part.name}.bias", (part.height,), part.rows, part.bias) for part in self.parts]


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

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``activation(x @ weight.T + bias)``; x: ``[num_tokens, depth]``.

        Rounds to x's number format after the bias and after each half of the activation.
        """


class Quantization(Protocol):
    """Makes the methods of one model."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """Return the owner of a layer's tensors, which it declares in ``plan``."""

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """Return the owner of one matrix of all experts of a layer, likewise."""
