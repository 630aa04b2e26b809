"""Rows of a linear layer, and where a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quintet.executor.model_config.share import KeptRange


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a stacked layer, and where a checkpoint has them: in a tensor of their own, or among others of a larger one.

    The larger one's rows are ``groups`` pieces of one height; of each piece these are the rows from ``begin`` on::

        q k v                     groups 1: all queries, all keys, all values
        qqq k v | qqq k v | ...   groups of one KV head each

    A rank (`quintet.executor.model_config.share`) takes some of the rows that this describes, or all of them with
    some of their inputs.
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
    kept_rows: KeptRange | None = None
    """Which of the rows that the above describes these ``rows`` are; None: all."""
    kept_inputs: KeptRange | None = None
    """Which columns of the weight are taken; None: all."""
    leaves: int = 1
    """Into how many alike these inputs are divided; see `quintet.executor.backends.cpu.ops.packed_weight.PackedWeight`."""

    def __post_init__(self) -> None:
        total, described = self.height, self.described
        assert total % self.groups == 0 == described % self.groups, self
        assert 0 <= self.begin <= (total - described) // self.groups, self
        assert self.kept_rows is None or self.kept_rows.count == self.rows, self
        assert self.kept_inputs is None or not self.unit_rows, self

    @property
    def described(self) -> int:
        """Rows that all ranks together take."""
        return self.rows if self.kept_rows is None else self.kept_rows.whole

    @property
    def height(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.described if self.total is None else self.total

    def keeping(self, kept: KeptRange) -> RowRange:
        """Return the part that has these rows of this one alone."""
        assert self.kept_rows is None and kept.whole == self.rows, (self, kept)
        return replace(self, rows=kept.count, kept_rows=None if kept.is_all else kept)

    def of_inputs(self, kept: KeptRange, leaves: int) -> RowRange:
        """Return the part that has these columns alone, in so many leaves."""
        return replace(self, kept_inputs=None if kept.is_all else kept, leaves=leaves)

    @property
    def cut_columns(self) -> int:
        """Outputs that all ranks have, of each of all leaves: what slices are cut for, whoever multiplies."""
        others = 1 if self.kept_inputs is None else self.kept_inputs.whole // self.kept_inputs.count
        return self.described * self.leaves * others

    def weight_shape(self, depth: int) -> tuple[int, int]:
        """Return the checkpoint's shape of the weight, of which ``depth`` inputs are taken."""
        depth = depth if self.kept_inputs is None else self.kept_inputs.whole
        return (depth, self.height) if self.transposed else (self.height, depth)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, depth]`` of the checkpoint's weight: a view of it, or a copy where rows of groups are gathered."""
        tensor = tensor.t() if self.transposed else tensor
        if self.kept_inputs is not None:
            tensor = tensor[:, self.kept_inputs.begin : self.kept_inputs.end]
        rows = self.bias(tensor)
        return F.normalize(rows) if self.unit_rows else rows

    def bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor of ``height`` rows: ``[rows]`` of the bias."""
        kept = self.kept_rows or KeptRange(0, self.described, self.described)
        if self.described == self.height:
            return tensor if kept.is_all else tensor[kept.begin : kept.end]
        each = self.described // self.groups  # of a group
        first = kept.begin // each
        in_groups = tensor.view(self.groups, -1, *tensor.shape[1:])[first : -(-kept.end // each)]
        rows = in_groups[:, self.begin : self.begin + each].flatten(0, 1)
        return rows if kept.is_all else rows[kept.begin - first * each : kept.end - first * each]
