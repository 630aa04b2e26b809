"""Collect recipes: the model's tensor names, layer by layer, mapped to those of a GGUF file."""

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
    """Recipes of one layer, or of the tensors outside layers. Tensors that the file lacks get no recipe; the loader
    reports them."""

    tensors: Mapping[str, Tensor]
    """Tensors of the file."""
    names: Names
    """Tensor names of the model."""
    layer: int | None = None
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """Keyed by the model's full name."""

    def in_layer(self, index: int) -> TensorMap:
        """Return the map of a layer, with the same recipes."""
        return TensorMap(self.tensors, self.names, index, self.recipes)

    def tensor(self, theirs: str) -> Tensor | None:
        """Return the file's tensor, named within its layer."""
        return self.tensors.get(self._theirs(theirs))

    def has(self, module: str) -> bool:
        """Return True if the file has the weight of a module, or of a norm without the suffix (Falcon-H1)."""
        return self.tensor(f"{module}.weight") is not None or self.tensor(module) is not None

    def rows(self, theirs: str) -> TensorRows | None:
        """Return all rows of a tensor; None if the file lacks it."""
        tensor = self.tensor(theirs)
        return None if tensor is None else all_rows(self._theirs(theirs), tensor)

    def add(
        self, ours: str, rows: tuple[TensorRows, ...], shape: tuple[int, ...], finish: Finish | None = None
    ) -> None:
        """Add a recipe."""
        whole = ours if self.layer is None else self.names.in_layer(self.layer, ours)
        self.recipes[whole] = Recipe(rows, shape, finish)

    def stacked(self, ours: str, rows: tuple[TensorRows, ...]) -> None:
        """Add a tensor of concatenated rows of equal depth, or of concatenated vectors."""
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
        """Add a copy of a file's tensor, optionally with another ``shape``, row ``order``, or a ``finish`` step."""
        rows, tensor = self.rows(theirs), self.tensor(theirs)
        if rows is not None and tensor is not None:
            self.add(ours, (rows.reordered(order),), tensor.shape if shape is None else shape, finish)

    def module(self, ours: str, theirs: str) -> None:
        """Add weight and bias of a linear layer or table."""
        for leaf in ("weight", "bias"):
            rows = self.rows(f"{theirs}.{leaf}")
            if rows is not None:
                self.stacked(f"{ours}.{leaf}", (rows,))

    def norm(self, ours: str, theirs: str, spec: NormSpec | None) -> None:
        """Add a norm; the file's weight includes the offset."""
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
    """Return the number of selected rows."""
    if isinstance(rows.order, slice):
        return len(range(*rows.order.indices(height(tensor.shape))))
    return len(rows.order)
