"""Collects recipes: what a model calls its tensors, layer by layer, and what a GGUF file does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.header import Tensor
from quintet.executor.checkpoints.gguf.tensor_recipes import (
    Finish,
    Recipe,
    TensorRows,
    all_rows,
    height,
    minus,
)
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormSpec


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One layer's, or those around the layers; what the file lacks gets no recipe, and is missed by whoever expects it."""

    tensors: Mapping[str, Tensor]
    """The file's."""
    names: Names
    """The model's."""
    layer: int | None = None
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """By the model's whole name."""

    def in_layer(self, index: int) -> TensorMap:
        """Return the same for a layer."""
        return TensorMap(self.tensors, self.names, index, self.recipes)

    def tensor(self, theirs: str) -> Tensor | None:
        """Return the file's tensor, named within its layer."""
        return self.tensors.get(self._theirs(theirs))

    def has(self, module: str) -> bool:
        """Whether the file has the weight of a module, or of a norm that is called by its bare name (Falcon-H1's)."""
        return self.tensor(f"{module}.weight") is not None or self.tensor(module) is not None

    def rows(self, theirs: str) -> TensorRows | None:
        """Return all rows of a tensor; None where the file lacks it."""
        tensor = self.tensor(theirs)
        return None if tensor is None else all_rows(self._theirs(theirs), tensor)

    def add(
        self, ours: str, rows: tuple[TensorRows, ...], shape: tuple[int, ...], finish: Finish | None = None
    ) -> None:
        """Say how a tensor is made."""
        whole = ours if self.layer is None else self.names.in_layer(self.layer, ours)
        self.recipes[whole] = Recipe(rows, shape, finish)

    def stacked(self, ours: str, rows: tuple[TensorRows, ...]) -> None:
        """Say that a tensor is rows one below the other, of one depth; of vectors one behind the other."""
        tensors = [self.tensors[each.name] for each in rows]
        num_rows = sum(height_of(each, tensor) for each, tensor in zip(rows, tensors, strict=True))
        shape = (num_rows,) if len(tensors[0].shape) == 1 else (num_rows, tensors[0].shape[-1])
        self.add(ours, rows, shape)

    def whole(
        self,
        ours: str,
        theirs: str,
        finish: Finish | None = None,
        shape: tuple[int, ...] | None = None,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        """Say that a tensor is one of the file's: of another ``shape``, its rows in another ``order``, or finished, perhaps."""
        rows, tensor = self.rows(theirs), self.tensor(theirs)
        if rows is not None and tensor is not None:
            self.add(ours, (rows.reordered(order),), tensor.shape if shape is None else shape, finish)

    def module(self, ours: str, theirs: str) -> None:
        """Say that a linear layer, or a table, is one of the file's."""
        for leaf in ("weight", "bias"):
            rows = self.rows(f"{theirs}.{leaf}")
            if rows is not None:
                self.stacked(f"{ours}.{leaf}", (rows,))

    def norm(self, ours: str, theirs: str, spec: NormSpec | None) -> None:
        """Say that a norm is one of the file's, which has added the offset."""
        if spec is not None:
            bare = self.tensor(theirs) is not None
            self.whole(
                f"{ours}.weight",
                theirs if bare else f"{theirs}.weight",
                minus(spec.offset) if spec.offset else None,
            )
            self.whole(f"{ours}.bias", f"{theirs}.bias")

    def _theirs(self, name: str) -> str:
        return name if self.layer is None else f"blk.{self.layer}.{name}"


def height_of(rows: TensorRows, tensor: Tensor) -> int:
    """Return how many rows are taken."""
    if isinstance(rows.order, slice):
        return len(range(*rows.order.indices(height(tensor.shape))))
    return len(rows.order)
