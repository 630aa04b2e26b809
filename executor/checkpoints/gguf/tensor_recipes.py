"""Recipes of the model's tensors: selected rows of GGUF tensors, in some order; collected layer by layer (`TensorMap`).

Rows are whole blocks, so row operations apply to packed and dequantized data. Operations on values (a norm's offset,
a transposition) are a `Finish`; a tensor with one cannot stay packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.header import Tensor
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormSpec

Finish = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Takes the values of each `TensorRows`, ``[rows, depth]`` or ``[rows]`` for vectors; returns the whole tensor."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Selected rows of one tensor of the file; the elements of a vector count as rows."""

    name: str
    order: slice | NDArray[np.int64]
    """Selected indices, in order; a slice has both ends."""

    def between(self, begin: int, end: int) -> TensorRows:
        """Return a range of these rows."""
        if isinstance(self.order, slice):
            return TensorRows(self.name, slice(self.order.start + begin, self.order.start + end))
        return TensorRows(self.name, self.order[begin:end])

    def reordered(self, order: NDArray[np.int64] | None) -> TensorRows:
        """Return these rows in another order; None: unchanged."""
        if order is None:
            return self
        if isinstance(self.order, slice):
            return TensorRows(self.name, order + self.order.start)
        return TensorRows(self.name, self.order[order])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of one expected tensor."""

    rows: tuple[TensorRows, ...]
    """Concatenated, unless ``finish`` combines them."""
    shape: tuple[int, ...]
    finish: Finish | None = None
    computes: bool = False
    """True: ``finish`` does arithmetic; it gets fp32, so the result is rounded once."""


def all_rows(name: str, tensor: Tensor) -> TensorRows:
    """Return all rows of a tensor."""
    return TensorRows(name, slice(0, height(tensor.shape)))


def height(shape: tuple[int, ...]) -> int:
    """Return the number of rows: the product of all dimensions but the innermost; the length of a vector."""
    return math.prod(shape[:-1] or shape)


def scaled(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Recipe:
    """Return the recipe with the factor of a ``.scale`` tensor, if the file has one: early BitNet files."""
    stem, _, leaf = recipe.rows[0].name.rpartition(".")
    scale = tensors.get(f"{stem}.scale") if leaf == "weight" and len(recipe.rows) == 1 else None
    if scale is None or scale.shape != (1,) or recipe.finish is not None:
        return recipe
    rows = (*recipe.rows, all_rows(f"{stem}.scale", scale))
    return replace(recipe, rows=rows, finish=_product, computes=True)


def _product(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] * parts[1]


def unpaired(heads: int, dim: int) -> NDArray[np.int64]:
    """Return the row order that converts adjacent rotary pairs of queries or keys to halves of a head."""
    return np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts as columns of one matrix."""
    return torch.cat(list(parts), 1)


def minus(offset: float) -> Finish:
    """Return a step that subtracts the offset that the file added to a norm's weight."""
    return lambda parts: parts[0].float() - offset


def log_of_negative(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Convert the file's ``-exp(A_log)`` to ``A_log``."""
    return torch.log(-parts[0].float())


def permuted(order: NDArray[np.int64]) -> Finish:
    """Return a step that reorders columns."""
    columns = torch.from_numpy(order)
    return lambda parts: parts[0][:, columns]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Recipes of one layer, or of the tensors outside layers. Tensors that the file lacks get no recipe; the loader
    reports them."""

    tensors: Mapping[str, Tensor]
    """Tensors of the file."""
    names: Names
    """Tensor names of the model."""
    layer: int | None = None
    inside: str = ""
    """Prefix of the model's names: a module of the layer."""
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """Keyed by the model's full name."""

    def in_layer(self, index: int) -> TensorMap:
        """Return the map of a layer, with the same recipes."""
        return replace(self, layer=index)

    def within(self, module: str) -> TensorMap:
        """Return the map of a module, with the same recipes."""
        return replace(self, inside=f"{module}.")

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
        ours = f"{self.inside}{ours}"
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
