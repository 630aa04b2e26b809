"""Rows of a linear layer and their place in a checkpoint tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quintet.executor.model_config.share import KeptRange


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a stacked layer: a whole checkpoint tensor, or rows of a larger one.

    The rows of the larger tensor are ``groups`` groups of one height; this range takes rows from ``begin`` on of each
    group::

        q k v                     groups 1: all queries, all keys, all values
        qqq k v | qqq k v | ...   one group for each KV head

    A rank (`quintet.executor.model_config.share`) takes some of these rows, or all of them with some inputs.
    """

    name: str
    """Tensor name without ``.weight`` or ``.bias``. Several parts may have the same name."""
    rows: int
    total: int | None = None
    """Rows of the tensor; None: all belong to this range."""
    begin: int = 0
    groups: int = 1
    transposed: bool = False
    """True: the checkpoint's weight is ``[depth, total]``."""
    unit_rows: bool = False
    """True: each row of the weight is divided by its norm."""
    kept_rows: KeptRange | None = None
    """Subset of the described rows that this rank holds; None: all."""
    kept_inputs: KeptRange | None = None
    """Columns of the weight that this rank holds; None: all."""
    leaves: int = 1
    """Number of equal slices of these inputs; see `quintet.executor.backends.cpu.ops.packed_weight.PackedWeight`."""

    def __post_init__(self) -> None:
        total, described = self.height, self.described
        assert total % self.groups == 0 == described % self.groups, self
        assert 0 <= self.begin <= (total - described) // self.groups, self
        assert self.kept_rows is None or self.kept_rows.count == self.rows, self
        assert self.kept_inputs is None or not self.unit_rows, self

    @property
    def described(self) -> int:
        """Rows of all ranks together."""
        return self.rows if self.kept_rows is None else self.kept_rows.whole

    @property
    def height(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.described if self.total is None else self.total

    def keeping(self, kept: KeptRange) -> RowRange:
        """Return a range with only these rows."""
        assert self.kept_rows is None and kept.whole == self.rows, (self, kept)
        return replace(self, rows=kept.count, kept_rows=None if kept.is_all else kept)

    def of_inputs(self, kept: KeptRange, leaves: int) -> RowRange:
        """Return a range with only these columns, in ``leaves`` slices."""
        return replace(self, kept_inputs=None if kept.is_all else kept, leaves=leaves)

    @property
    def cut_columns(self) -> int:
        """Outputs of all ranks times all leaves: slices are sized for these on every rank."""
        others = 1 if self.kept_inputs is None else self.kept_inputs.whole // self.kept_inputs.count
        return self.described * self.leaves * others

    def weight_shape(self, depth: int) -> tuple[int, int]:
        """Return the checkpoint's shape of a weight with ``depth`` inputs on this rank."""
        depth = depth if self.kept_inputs is None else self.kept_inputs.whole
        return (depth, self.height) if self.transposed else (self.height, depth)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, depth]`` of the checkpoint's weight: a view, or a copy if rows of groups are gathered."""
        tensor = tensor.t() if self.transposed else tensor
        if self.kept_inputs is not None:
            tensor = tensor[:, self.kept_inputs.begin : self.kept_inputs.end]
        rows = self.bias(tensor)
        return F.normalize(rows) if self.unit_rows else rows

    def bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range's rows of a tensor of ``height`` rows: ``[rows]`` of a bias."""
        kept = self.kept_rows or KeptRange(0, self.described, self.described)
        if self.described == self.height:
            return tensor if kept.is_all else tensor[kept.begin : kept.end]
        each = self.described // self.groups  # rows of one group
        first = kept.begin // each
        in_groups = tensor.view(self.groups, -1, *tensor.shape[1:])[first : -(-kept.end // each)]
        rows = in_groups[:, self.begin : self.begin + each].flatten(0, 1)
        return rows if kept.is_all else rows[kept.begin - first * each : kept.end - first * each]
