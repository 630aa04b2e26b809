"""A matrix per head: declared with the model, filled by a loader."""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch

from quintet.executor.backends.cpu.ops.host_linear import head_linear
from quintet.executor.checkpoints.quant.stack import StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.models.layers.experts import StackQuantization


class HeadLinear:
    """``y[:, head] = x[:, head] @ weight[head].T`` for x ``[tokens, heads * depth]``, y ``[tokens, heads * columns]``."""

    def __init__(self, quantization: StackQuantization, plan: WeightPlan, shape: StackShape) -> None:
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
