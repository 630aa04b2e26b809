"""Recipes of the model's tensors: selected rows of GGUF tensors, in some order.

Rows are whole blocks, so row operations apply to packed and dequantized data. Operations on values (a norm's offset,
a transposition) are a `Finish`; a tensor with one cannot stay packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.header import Tensor

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
    rows = 1
    for size in shape[:-1] or shape:
        rows *= size
    return rows


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
