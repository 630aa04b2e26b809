"""One matrix of every expert of a layer: its description and the owners of its weights.

A method object declares the checkpoint's tensors in a plan when it is made; the loader fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.fill import fill
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.executor.checkpoints.quant.packed_formats import LAYOUT, PackedFormat
from quintet.executor.checkpoints.quant.source import Expect, Rows, RowSource, floats_of
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import Description


class StackRows(Protocol):
    """Rows of some experts' matrices."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, int, Rows], object]) -> None:
        """Expect checkpoint tensors; after the last one arrives, call ``fill(expert, begin, rows)`` for all rows in
        turn."""


@dataclass(frozen=True, slots=True)
class StackPiece:
    """Rows from one checkpoint tensor, or from several that are needed together. A `StackRows`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor."""
    first: int
    """Experts ``[first, first + count)``."""
    count: int
    begin: int
    """Index of the first row in the matrix."""
    take: Callable[[Sequence[torch.Tensor], int], Rows]
    """Takes the tensors and an expert's index below ``count``; returns its rows ``[rows, depth]``, of a bias ``[rows]``."""
    bytes_between: tuple[tuple[int, int], ...] = ()
    """For byte tensors, the range of dummy values of each. Empty: the tensors are numbers."""
    scheme: Scheme | None = None
    """Coding of the rows that ``take`` returns; None: they are floating point."""
    is_whole: bool = False
    """True: the rows are all rows of one expert's tensor, unchanged."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, int, Rows], object]) -> None:
        arrived: dict[int, torch.Tensor] = {}

        def take(place: int, tensor: torch.Tensor) -> None:
            arrived[place] = tensor
            if len(arrived) == len(self.names):
                tensors = [arrived[i] for i in range(len(self.names))]
                arrived.clear()
                for i in range(self.count):
                    fill(self.first + i, self.begin, self.take(tensors, i))

        for place, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            expect(name, shape, partial(take, place))
        for name, between in zip(self.names, self.bytes_between, strict=False):
            plan.as_codes(name, ("U8",), between)


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Rows of one expert from a source. A `StackRows`."""

    source: RowSource
    expert: int
    begin: int
    """Index of the first row in the matrix."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, int, Rows], object]) -> None:
        self.source.declare(plan, expect, lambda place, rows: fill(self.expert, self.begin + place, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Description that a model gives of one matrix of its experts."""

    label: str
    """Identifies the checkpoint's matrices and their transformation: part of the packed cache's key."""
    experts: int
    columns: int
    depth: int
    paired: bool
    """True: the first half of the columns are gates, the second half the matching up projections."""
    weights: Sequence[StackRows]
    biases: Sequence[StackRows] = ()
    """``[columns]`` for each expert; empty: no biases."""
    is_exact: bool = False
    """See `quintet.executor.checkpoints.quant.method.LinearShape`."""
    places: int = 0
    """Spare slots after the experts, for copies of other experts. The checkpoint does not fill them."""


class StackMethod(Protocol):
    """Owner of the experts' tensors."""

    @property
    def bias(self) -> torch.Tensor | None:
        """``[experts + places, columns]`` in the model's number format."""

    @property
    def packed(self) -> Sequence[PackedWeight] | None:
        """Packed weights of the host library, spare slots last; None if torch multiplies."""

    @property
    def table(self) -> torch.Tensor | None:
        """Row-major weights ``[experts, columns, depth]`` in the model's number format; None if held in another form."""

    @property
    def inputs(self) -> Inputs:
        """See `quintet.executor.checkpoints.quant.method.LinearMethod`."""


class RowMajorStack:
    """Weights in the model's number format, multiplied by torch. A `StackMethod`."""

    packed = None
    inputs = Inputs.SIXTEEN_BITS

    def __init__(self, shape: StackShape, plan: WeightPlan) -> None:
        self.table = _filled(shape.weights, plan, shape.experts, shape.columns, shape.depth)
        self.bias = bias_of(shape, plan)


class PackedStack:
    """Weights packed for the host kernels in one section, plus spare slots. A `StackMethod` and a `PackedStore`."""

    table = None

    def __init__(
        self, library: LinearLibrary, shape: StackShape, plan: WeightPlan, packed_format: PackedFormat
    ) -> None:
        self._library, self._shape, self._packed_format = library, shape, packed_format
        self._packed: list[PackedWeight] | None = None
        self.inputs = packed_format.inputs
        one = library.weight_bytes(
            *(int(packed_format.weight_format), shape.columns, shape.depth, packed_format.group, shape.paired)
        )
        self.num_bytes: int = one * shape.experts
        plan.store(self)
        self._places: list[PackedWeight] = []
        if shape.places:
            memory = HugePages(one * shape.places).memory
            self._places = [*map(self._weight, memory.chunk(shape.places))]
            plan.num_bytes += one * shape.places
        for piece in shape.weights:
            piece.declare(plan, plan.pack, self._fill)
        self.bias = bias_of(shape, plan)

    @property
    def packed(self) -> Sequence[PackedWeight]:
        """The packed weights; only after a loader has set their memory."""
        assert self._packed is not None, "used before they were loaded"
        return self._packed

    @property
    def description(self) -> Description:
        shape, packed_format = self._shape, self._packed_format
        return {
            "layer": shape.label,
            "layout": LAYOUT,
            "format": packed_format.weight_format.name,
            "group": packed_format.group,
            "experts": shape.experts,
            "columns": shape.columns,
            "depth": shape.depth,
            "paired": shape.paired,
        }

    def open(self, memory: torch.Tensor) -> None:
        self._packed = [*map(self._weight, memory.chunk(self._shape.experts)), *self._places]

    def _weight(self, memory: torch.Tensor) -> PackedWeight:
        shape, packed_format = self._shape, self._packed_format
        return PackedWeight(
            self._library,
            packed_format.weight_format,
            shape.columns,
            shape.depth,
            group=packed_format.group,
            paired=shape.paired,
            memory=memory,
        )

    def round_inputs(self) -> bool:
        """Round inputs to 8 bits if the weights are integer. Return True if they are."""
        self.inputs = self._packed_format.rounded_inputs
        return self.inputs is not Inputs.SIXTEEN_BITS

    def _fill(self, expert: int, begin: int, rows: Rows) -> None:
        fill(self.packed[expert], rows, begin)


def bias_of(shape: StackShape, plan: WeightPlan) -> torch.Tensor | None:
    """Return the tensor for the biases ``[experts + places, columns]``; None if there are none."""
    return _filled(shape.biases, plan, shape.experts + shape.places, shape.columns) if shape.biases else None


def _filled(pieces: Sequence[StackRows], plan: WeightPlan, *size: int) -> torch.Tensor:
    """Return a tensor ``[experts, columns, …]`` that the pieces fill; rows without a piece stay uninitialized."""
    whole = torch.empty(size, dtype=plan.dtype, device=plan.device)
    plan.num_bytes += whole.numel() * whole.element_size()

    def keep(expert: int, begin: int, rows: Rows) -> None:
        floats = floats_of(rows)
        whole[expert, begin : begin + len(floats)].copy_(floats)

    for piece in pieces:
        piece.declare(plan, plan.expect, keep)
    return whole
