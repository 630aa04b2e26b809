"""Linear layers and the embedding of a model: declared while it is built, filled by a loader, then used.

Owns no number: the method object that the quantization made for the layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.weights.plan import WeightPlan

__all__ = ["Embedding", "GatedActivation", "Linear", "RowRange"]


class LinearSetting(Protocol):
    """As much of a model's setting as its linear layers need."""

    @property
    def quantization(self) -> Quantization:
        """Who makes their methods."""


class Linear:
    """``activation(x @ weight.T + bias)``, the weights of several parts stacked."""

    __slots__ = ("method", "shape")

    def __init__(
        self,
        setting: LinearSetting,
        plan: WeightPlan,
        parts: Sequence[RowRange],
        depth: int,
        *,
        biased: bool = False,
        activation: GatedActivation = GatedActivation.NONE,
        is_output_layer: bool = False,
        is_exact: bool = False,
        result_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = LinearShape(
            tuple(parts), depth, biased, activation, is_output_layer, is_exact, result_dtype
        )
        self.method: LinearMethod = setting.quantization.linear(self.shape, plan)

    @property
    def columns(self) -> int:
        """Rows of all parts; the result is half as wide where the activation multiplies gates and ups."""
        return self.shape.columns

    @property
    def width(self) -> int:
        """Width of the result."""
        return self.columns // 2 if self.activation else self.columns

    @property
    def depth(self) -> int:
        """Width of the input."""
        return self.shape.depth

    @property
    def activation(self) -> GatedActivation:
        """What the result goes through."""
        return self.shape.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result ``[num_tokens, width]`` for x ``[num_tokens, depth]``; see `LinearMethod.apply`."""
        return self.method.apply(x)


class Embedding:
    """Rows by token id: of a table of its own, or of a linear layer's weight, mostly the output layer's it is tied to."""

    __slots__ = ("_method", "_plan", "_table", "width")

    def __init__(
        self,
        setting: LinearSetting,
        plan: WeightPlan,
        name: str,
        rows: int,
        width: int,
        tied_to: Linear | None = None,
    ) -> None:
        """Expect ``name`` (without ``.weight``), unless ``tied_to`` holds the same numbers already."""
        self._plan = plan
        if tied_to is not None and not tied_to.method.is_quantized:
            self._method: LinearMethod | None = tied_to.method
        else:
            self._method = setting.quantization.embedding(LinearShape((RowRange(name, rows),), width), plan)
        self._table: torch.Tensor | None = None
        self.width = width
        if self._method is None:
            size = rows * width * plan.dtype.itemsize
            plan.expect(f"{name}.weight", (rows, width), self._keep, num_bytes=size)

    @property
    def packed(self) -> PackedWeight | None:
        """A weight whose columns are the rows; None where there is a table."""
        return None if self._method is None else self._method.packed

    @property
    def table(self) -> torch.Tensor | None:
        """``[rows, width]`` in the model's number format, row-major; None where there is a packed weight."""
        return self._table if self._method is None else self._method.table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``token_ids [num_tokens]``: ``[num_tokens, width]``."""
        if self.packed is not None:
            return _gather(self.packed, token_ids).to(self._plan.dtype)
        assert self.table is not None, "used before it was loaded"
        return self.table.index_select(0, token_ids)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep the view of the mapped file where it is in the right format: only rows that are asked for are ever read."""
        self._table = tensor.to(device=self._plan.device, dtype=self._plan.dtype)


def _gather(packed: PackedWeight, token_ids: torch.Tensor) -> torch.Tensor:
    ids, where = torch.unique(token_ids, return_inverse=True)
    rows = torch.cat([packed.read(token_id, 1) for token_id in ids.tolist()])
    return rows[where]
