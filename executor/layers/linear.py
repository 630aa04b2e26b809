"""Linear layers and the embedding of a model: declared while it is built, filled by a loader, then used.

Owns no number: the method object that the quantization made for the layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.ops.linear import Activation
from quintet.executor.quant.method import LinearMethod, LinearShape, Part, Quantization
from quintet.executor.weights.plan import WeightPlan

__all__ = ["Activation", "Embedding", "Linear", "Part"]


class LinearSetting(Protocol):
    """As much of a model's setting as its linear layers need."""

    @property
    def quantization(self) -> Quantization:
        """Who makes their methods."""


class Linear:
    """``residual + activation(x @ weight.T + bias)``, the weights of several parts stacked."""

    __slots__ = ("method", "shape")

    def __init__(
        self,
        setting: LinearSetting,
        plan: WeightPlan,
        parts: Sequence[Part],
        depth: int,
        *,
        biased: bool = False,
        activation: Activation = Activation.NONE,
        is_output_layer: bool = False,
    ) -> None:
        self.shape = LinearShape(tuple(parts), depth, biased, activation, is_output_layer)
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
    def activation(self) -> Activation:
        """What the result goes through."""
        return self.shape.activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer's result ``[num_tokens, width]`` for x ``[num_tokens, depth]``; see `LinearMethod.apply`."""
        return self.method.apply(x, residual)


class Embedding:
    """Rows by token id."""

    __slots__ = ("_plan", "_table", "_tied_to", "width")

    def __init__(
        self, plan: WeightPlan, name: str, rows: int, width: int, tied_to: Linear | None = None
    ) -> None:
        """Expect ``name`` (without ``.weight``); share the tensor of ``tied_to`` where it keeps its numbers unquantized."""
        self._tied_to = tied_to
        self._plan = plan
        self.width = width
        self._table: torch.Tensor | None = None
        if tied_to is None or tied_to.method.table is None:
            plan.expect(
                f"{name}.weight", (rows, width), self._keep, num_bytes=rows * width * plan.dtype.itemsize
            )

    @property
    def table(self) -> torch.Tensor | None:
        """``[rows, width]`` in the model's number format, row-major."""
        if self._tied_to is not None and self._tied_to.method.table is not None:
            return self._tied_to.method.table
        return self._table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``token_ids [num_tokens]``: ``[num_tokens, width]``."""
        assert self.table is not None, "used before it was loaded"
        return self.table.index_select(0, token_ids)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep the view of the mapped file where it is in the right format: only rows that are asked for are ever read."""
        self._table = tensor.to(device=self._plan.device, dtype=self._plan.dtype)
