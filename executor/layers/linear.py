"""A linear layer between declaration, loading and use."""

from __future__ import annotations

import torch

from quintet.executor.ops.linear import LinearFunction
from quintet.executor.ops.table import Ops


class Linear:
    """Holds a weight while a loader fills it, then only its packed form."""

    __slots__ = ("_apply", "_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight: torch.Tensor | None = weight  # [out, in]
        self._bias = bias  # [out]
        self._apply: LinearFunction | None = None

    def pack(self, ops: Ops) -> None:
        """Make the layer ready for use; its weight must be loaded."""
        assert self._weight is not None, "packed twice"
        self._apply = ops.pack_linear(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; x: ``[num_tokens, in]``."""
        assert self._apply is not None, "used before pack()"
        return self._apply(x)
