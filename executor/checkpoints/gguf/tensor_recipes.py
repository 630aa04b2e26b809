"""How a tensor that a model expects is made of those that a GGUF file has: rows of these, in some order.

TensorRows are whole blocks, so whatever is said of rows holds of packed numbers as of those that they stand for. What is done to
numbers themselves (a norm's offset, a transposition) is a `Finish`; a tensor with one cannot be kept packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.header import Tensor

Finish = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""From the numbers of each `TensorRows`, ``[rows, depth]`` or of vectors ``[rows]``, to the whole."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """TensorRows of one tensor of the file; of a vector its numbers are the rows."""

    name: str
    order: slice | NDArray[np.int64]
    """Which, in which order; a slice has both ends."""

    def between(self, begin: int, end: int) -> TensorRows:
        """Return some of these that follow each other."""
        if isinstance(self.order, slice):
            return TensorRows(self.name, slice(self.order.start + begin, self.order.start + end))
        return TensorRows(self.name, self.order[begin:end])

    def reordered(self, order: NDArray[np.int64] | None) -> TensorRows:
        """Return these in another order; None: as they are."""
        if order is None:
            return self
        if isinstance(self.order, slice):
            return TensorRows(self.name, order + self.order.start)
        return TensorRows(self.name, self.order[order])


@dataclass(frozen=True, slots=True)
class Recipe:
    """One expected tensor."""

    rows: tuple[TensorRows, ...]
    """One below the other, unless ``finish`` puts them together."""
    shape: tuple[int, ...]
    finish: Finish | None = None
    computes: bool = False
    """Whether ``finish`` computes with numbers: it is given fp32, so that what comes of it is rounded once."""


def all_rows(name: str, tensor: Tensor) -> TensorRows:
    """Return all rows of a tensor."""
    return TensorRows(name, slice(0, height(tensor.shape)))


def height(shape: tuple[int, ...]) -> int:
    """Return how many rows a tensor has: the product of all dimensions but the innermost, of a vector that one."""
    rows = 1
    for size in shape[:-1] or shape:
        rows *= size
    return rows


def scaled(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Recipe:
    """Return the recipe of what is multiplied by a number too, where the file has that in a tensor: early ones of BitNet."""
    stem, _, leaf = recipe.rows[0].name.rpartition(".")
    scale = tensors.get(f"{stem}.scale") if leaf == "weight" and len(recipe.rows) == 1 else None
    if scale is None or scale.shape != (1,) or recipe.finish is not None:
        return recipe
    rows = (*recipe.rows, all_rows(f"{stem}.scale", scale))
    return replace(recipe, rows=rows, finish=_product, computes=True)


def _product(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] * parts[1]


def unpaired(heads: int, dim: int) -> NDArray[np.int64]:
    """Return where rows of queries or keys lie whose pairs are neighbours, for a model that rotates halves of a head."""
    return np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Finish what is expected as columns of one matrix."""
    return torch.cat(list(parts), 1)


def minus(offset: float) -> Finish:
    """Finish the weight of a norm that the file has with its offset added."""
    return lambda parts: parts[0].float() - offset


def log_of_negative(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Finish ``A_log``, which the file has as ``-exp`` of it."""
    return torch.log(-parts[0].float())


def permuted(order: NDArray[np.int64]) -> Finish:
    """Finish a matrix whose columns are expected in another order."""
    columns = torch.from_numpy(order)
    return lambda parts: parts[0][:, columns]
