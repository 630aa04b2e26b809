"""The seam between a linear layer of a model and whoever owns its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.host_linear import Inputs
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.quant.source import PlainRows, RowSource
from quintet.executor.checkpoints.quant.stack import StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import PlannedRows, WeightPlan


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a model says about one of its linear layers."""

    parts: Sequence[RowRange]
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
    result_dtype: torch.dtype | None = None
    """Number format of the result: float32, to which sums need no rounding, or the input's; None: the input's."""

    @property
    def columns(self) -> int:
        """Rows of all parts: the width of the product, before the activation."""
        return sum(part.rows for part in self.parts)

    @property
    def is_partial(self) -> bool:
        """Whether the result is a rank's part of the sums: other ranks have the other inputs. The bias is then not yet added."""
        return any(part.kept_inputs is not None for part in self.parts)

    @property
    def leaves(self) -> int:
        """Into how many alike the inputs are divided; see `RowRange`."""
        return max(part.leaves for part in self.parts)

    @property
    def cut_columns(self) -> int:
        """What slices of the inputs are cut for; see `RowRange`."""
        return sum(part.cut_columns for part in self.parts)

    @property
    def sources(self) -> list[RowSource]:
        """What a checkpoint in floating-point numbers has of the weight, in the order of the parts."""
        return [PlainRows(part, self.depth) for part in self.parts]

    @property
    def biases(self) -> list[PlannedRows]:
        """Of the checkpoint, in the order of the parts; where the layer is biased."""
        return [PlannedRows(f"{part.name}.bias", (part.height,), part.rows, part.bias) for part in self.parts]


class PackedRun(Protocol):
    """Neighbouring columns of a layer, in one packed weight."""

    @property
    def packed(self) -> PackedWeight:
        """The weight, once it is loaded."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[columns]`` in the model's number format."""

    @property
    def order(self) -> torch.Tensor | None:
        """The input that is first, second … for the packed weight: int32 ``[depth]``; None: as they are."""

    @property
    def inputs(self) -> Inputs:
        """What its inputs are rounded to."""

    def round_inputs(self) -> bool:
        """Have them rounded to 8 bits, if the weight is in integers. Return whether they are."""


class LinearMethod(Protocol):
    """Owns the tensors of one layer. Declares them in a plan when made, is filled by the loader, and then multiplies."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[columns]`` in the model's number format; None also where runs have their own."""

    @property
    def packed(self) -> PackedWeight | None:
        """The weight in the form of the host library; None where torch multiplies, or where it is several."""

    @property
    def runs(self) -> Sequence[PackedRun]:
        """All columns in the form of the host library, in their order; none where torch multiplies."""

    @property
    def table(self) -> torch.Tensor | None:
        """The weight row-major in the model's number format ``[columns, depth]``, where it is held so."""

    @property
    def is_quantized(self) -> bool:
        """Whether the weight's numbers are others than the checkpoint's."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``activation(x @ weight.T + bias)``; x: ``[num_tokens, depth]``.

        Rounds to x's number format after the bias and after each half of the activation; to `LinearShape.result_dtype` where
        there is one.
        """


class Quantization(Protocol):
    """Makes the methods of one model."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """Return the owner of a layer's tensors, which it declares in ``plan``."""

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """Return the owner of one matrix of all experts of a layer, likewise."""

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        """Return the owner of a table whose rows are chosen by token id; None where its numbers are kept unpacked."""

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        """Whether one layer can hold gates beside their ups; where not, they are two."""
