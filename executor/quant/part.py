"""Rows of a linear layer, and where a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
