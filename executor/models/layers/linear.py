"""Linear layers and the embedding of a model: declared with the model, filled by a loader.

The quantization's method object owns the weights.

`HeadLinear` has a matrix per head.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch

from quintet.executor.backends.cpu.ops.host_linear import head_linear
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.quant.stack import StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.lora.adapters import LoraLayer

__all__ = ["Embedding", "GatedActivation", "HeadLinear", "Linear", "RowRange"]


class Linear:
    """``activation(x @ weight.T + bias)``, with the weights of several parts stacked."""

    __slots__ = ("lora", "method", "shape")

    def __init__(self, quantization: Quantization, plan: WeightPlan, shape: LinearShape) -> None:
        self.shape = shape
        self.method: LinearMethod = quantization.linear(shape, plan)
        self.lora: LoraLayer | None = None
        """Matrices of adapters, which a backend applies to the rows of their requests."""

    @property
    def columns(self) -> int:
        """Rows of all parts; a gated activation halves the output width."""
        return self.shape.columns

    @property
    def width(self) -> int:
        """Output width."""
        return self.columns // 2 if self.activation else self.columns

    @property
    def depth(self) -> int:
        """Input width."""
        return self.shape.depth

    @property
    def activation(self) -> GatedActivation:
        """The fused gated activation."""
        return self.shape.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result ``[num_tokens, width]`` for x ``[num_tokens, depth]``, without adapters; see `LinearMethod.apply`."""
        return self.method.apply(x)


class Embedding:
    """Rows by token id from a table, or from a linear layer's weight: usually the tied output layer."""

    __slots__ = ("_method", "_plan", "_table", "width")

    def __init__(
        self,
        quantization: Quantization,
        plan: WeightPlan,
        name: str,
        rows: int,
        width: int,
        tied_to: Linear | None = None,
    ) -> None:
        """Expect the tensor ``name`` (without ``.weight``), unless ``tied_to`` already holds unquantized weights."""
        self._plan = plan
        if tied_to is not None and not tied_to.method.is_quantized:
            self._method: LinearMethod | None = tied_to.method
        else:
            self._method = quantization.embedding(LinearShape((RowRange(name, rows),), width), plan)
        self._table: torch.Tensor | None = None
        self.width = width
        if self._method is None:
            size = rows * width * plan.dtype.itemsize
            plan.expect(f"{name}.weight", (rows, width), self._keep, num_bytes=size)

    @property
    def packed(self) -> PackedWeight | None:
        """A packed weight, with the rows as its columns; None if there is a table."""
        return None if self._method is None else self._method.packed

    @property
    def table(self) -> torch.Tensor | None:
        """``[rows, width]`` in the model's dtype, row-major; None if there is a packed weight."""
        return self._table if self._method is None else self._method.table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``token_ids [num_tokens]``: ``[num_tokens, width]``."""
        if self.packed is not None:
            return _gather(self.packed, token_ids).to(self._plan.dtype)
        assert self.table is not None, "used before it was loaded"
        return self.table.index_select(0, token_ids)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep the view of the mapped file if its dtype matches: then only rows in use are read."""
        self._table = tensor.to(device=self._plan.device, dtype=self._plan.dtype)


def _gather(packed: PackedWeight, token_ids: torch.Tensor) -> torch.Tensor:
    ids, where = torch.unique(token_ids, return_inverse=True)
    rows = torch.cat([packed.read(token_id, 1) for token_id in ids.tolist()])
    return rows[where]


class HeadLinear:
    """``y[:, head] = x[:, head] @ weight[head].T`` for x ``[tokens, heads * depth]``, y ``[tokens, heads * columns]``."""

    def __init__(self, quantization: Quantization, plan: WeightPlan, shape: StackShape) -> None:
        assert shape.is_exact and not shape.paired and not shape.biases, shape
        self.shape = shape
        self.method: StackMethod = quantization.stack(shape, plan)

    @property
    def depth(self) -> int:
        """Input width over all heads."""
        return self.shape.experts * self.shape.depth

    @property
    def width(self) -> int:
        """Output width over all heads."""
        return self.shape.experts * self.shape.columns

    @cached_property
    def handles(self) -> ctypes.Array[ctypes.c_void_p]:
        """Handles of the packed weights for the host kernels, after loading."""
        packed = self.method.packed
        assert packed is not None, "the weights are not packed"
        return (ctypes.c_void_p * len(packed))(*(each.handle for each in packed))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for x ``[tokens, heads * depth]``."""
        if self.method.packed is not None:
            return head_linear(self.handles, x, self.width)
        assert self.method.table is not None
        by_head = x.unflatten(1, (self.shape.experts, -1)).transpose(0, 1)  # [heads, tokens, depth]
        return torch.bmm(by_head, self.method.table.transpose(1, 2)).transpose(0, 1).flatten(1)
