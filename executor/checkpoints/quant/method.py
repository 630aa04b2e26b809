"""Interface between the linear layers of a model and the owners of their weights."""

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
    """Description that a model gives of one linear layer."""

    parts: Sequence[RowRange]
    """Row ranges, stacked in this order."""
    depth: int
    """Width of the input."""
    biased: bool = False
    activation: GatedActivation = GatedActivation.NONE
    is_output_layer: bool = False
    """True: the result is the logits."""
    is_exact: bool = False
    """True: the weight keeps the model's number format under any quantization. For small weights of decisions that are
    sensitive to rounding, such as routers."""
    result_dtype: torch.dtype | None = None
    """Number format of the result: float32 (the sums are not rounded) or the input's; None: the input's."""

    @property
    def columns(self) -> int:
        """Rows of all parts: width of the product before the activation."""
        return sum(part.rows for part in self.parts)

    @property
    def is_partial(self) -> bool:
        """True if the result is a partial sum of one rank; other ranks hold the other inputs. The bias is not yet added."""
        return any(part.kept_inputs is not None for part in self.parts)

    @property
    def leaves(self) -> int:
        """Number of equal slices of the inputs; see `RowRange`."""
        return max(part.leaves for part in self.parts)

    @property
    def cut_columns(self) -> int:
        """Number of columns that the slices of the inputs are sized for; see `RowRange`."""
        return sum(part.cut_columns for part in self.parts)

    @property
    def sources(self) -> list[RowSource]:
        """Sources of the weight in a floating-point checkpoint, in the order of the parts."""
        return [PlainRows(part, self.depth) for part in self.parts]

    @property
    def biases(self) -> list[PlannedRows]:
        """Planned bias rows, in the order of the parts; only for a layer with biases."""
        return [PlannedRows(f"{part.name}.bias", (part.height,), part.rows, part.bias) for part in self.parts]


class PackedRun(Protocol):
    """Adjacent columns of a layer in one packed weight."""

    @property
    def packed(self) -> PackedWeight:
        """The packed weight; only after loading."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[columns]`` in the model's number format."""

    @property
    def order(self) -> torch.Tensor | None:
        """Permutation of the inputs for the packed weight, int32 ``[depth]``; None: no permutation."""

    @property
    def inputs(self) -> Inputs:
        """Precision that inputs are rounded to."""

    def round_inputs(self) -> bool:
        """Round inputs to 8 bits if the weight is integer. Return True if it is."""


class LinearMethod(Protocol):
    """Owner of the tensors of one layer.

    Its constructor declares the tensors in a plan; the loader fills them; `apply` multiplies.
    """

    @property
    def bias(self) -> torch.Tensor | None:
        """``[columns]`` in the model's number format; None also if runs have their own biases."""

    @property
    def packed(self) -> PackedWeight | None:
        """Packed weight of the host library; None if torch multiplies or the layer has several packed weights."""

    @property
    def runs(self) -> Sequence[PackedRun]:
        """All columns as packed weights of the host library, in order; empty if torch multiplies."""

    @property
    def table(self) -> torch.Tensor | None:
        """Row-major weight ``[columns, depth]`` in the model's number format; None if it is held in another form."""

    @property
    def is_quantized(self) -> bool:
        """True if the weight's values differ from the checkpoint's."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``activation(x @ weight.T + bias)``; x: ``[num_tokens, depth]``.

        Rounds to x's number format after the bias and after each half of the activation; to `LinearShape.result_dtype`
        if that is set.
        """


class Quantization(Protocol):
    """Factory of the linear methods of one model."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """Return the owner of a layer's tensors, which it declares in ``plan``."""

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """Return the owner of one matrix of all experts of a layer, which it declares in ``plan``."""

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        """Return the owner of an embedding table (rows selected by token id); None: the table stays unpacked."""
        return None

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        """Return True if one layer can hold gate and up projections together; otherwise they are two layers."""
        return True
