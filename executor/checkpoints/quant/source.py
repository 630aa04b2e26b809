"""Where rows of a matrix come from: one tensor of a checkpoint, or those that a format has in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.backends.platforms.platform import import_string
from quintet.executor.checkpoints.quant.blocks import Blocks
from quintet.executor.checkpoints.quant.decode import ROWS_STEP, Coded, Decoder
from quintet.executor.checkpoints.quant.formats.cut import of_inputs
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.weights.plan import Sink, WeightPlan
from quintet.executor.model_config.share import KeptRange
from quintet.wire.errors import ConfigError

Rows = torch.Tensor | Coded | Blocks
Expect = Callable[[str, tuple[int, ...], Sink], None]
"""`WeightPlan.expect` or `WeightPlan.pack`."""

MOST_CODES = 4 << 20
"""Numbers that are unpacked at a time: 16 MB as fp32, and all threads have enough to do."""


def floats_of(rows: Rows) -> torch.Tensor:
    """Return rows in floating-point numbers."""
    return rows if isinstance(rows, torch.Tensor) else rows.floats()


def _rows_of(runs: Sequence[range], kept: KeptRange) -> list[range]:
    """Return these of the rows that runs have one behind the other."""
    found, first = [], 0
    for run in runs:
        begin, end = max(kept.begin - first, 0), min(kept.end - first, len(run))
        if begin < end:
            found.append(run[begin:end])
        first += len(run)
    return found


class RowSource(Protocol):
    """Rows of a matrix, and the tensors of a checkpoint that they are made of."""

    @property
    def rows(self) -> int:
        """How many."""

    @property
    def label(self) -> str:
        """Says what is made of what: part of the packed cache's key."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        """Expect the tensors; when all are there call ``fill(first, rows)`` until every row was handed over."""


@dataclass(frozen=True, slots=True)
class PlainRows:
    """A part of a weight in floating-point numbers."""

    part: RowRange
    depth: int

    @property
    def rows(self) -> int:
        """See `RowSource`."""
        return self.part.rows

    @property
    def label(self) -> str:
        """See `RowSource`: the tensor's name alone where these are all of its rows, as they are."""
        part = self.part
        if part == RowRange(part.name, part.rows):
            return part.name
        marks = "T" * part.transposed + "U" * part.unit_rows
        kept = "".join(each.label for each in (part.kept_rows, part.kept_inputs) if each)
        return f"{part.name}[{part.begin}/{part.groups}/{part.height}{marks}{kept}]"

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        """See `RowSource`."""
        part = self.part
        expect(
            f"{part.name}.weight", part.weight_shape(self.depth), lambda tensor: fill(0, part.weight(tensor))
        )


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A part of a weight that a format holds in codes."""

    part: RowRange
    depth: int
    scheme: Scheme

    @property
    def rows(self) -> int:
        """See `RowSource`."""
        return self.part.rows

    @property
    def label(self) -> str:
        """See `RowSource`."""
        return f"{PlainRows(self.part, self.depth).label} {self.scheme}"

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        """See `RowSource`."""
        arrived: dict[str, torch.Tensor] = {}
        stored = self.scheme.stored

        def arrive(ending: str, tensor: torch.Tensor) -> None:
            arrived[ending] = tensor
            if len(arrived) == len(stored):
                try:
                    for first, rows in self._decoded(arrived):
                        fill(first, rows)
                except ConfigError as error:
                    raise ConfigError(f"layer {self.part.name!r}: {error}") from None
                arrived.clear()

        for each in stored:
            name = f"{self.part.name}.{each.ending}"
            expect(name, each.shape, lambda tensor, ending=each.ending: arrive(ending, tensor))  # type: ignore[misc]
            plan.as_codes(name, each.kinds, each.dummy_bytes)

    def _decoded(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[int, Coded]]:
        """Yield the part's rows, some at a time, with the place of the first of each."""
        decoder: Decoder = import_string(self.scheme.decoder)
        if self.part.kept_inputs is not None:
            tensors = of_inputs(self.scheme, tensors, self.part.kept_inputs)
        step = max(1, MOST_CODES // (self.depth * ROWS_STEP)) * ROWS_STEP
        place = 0
        for run in self._runs():
            for begin in range(run.start // ROWS_STEP * ROWS_STEP, run.stop, step):
                end = min(begin + step, self.part.height)
                coded = decoder(self.scheme, tensors, self.depth, begin, end)
                if self.scheme.input_factors is not None:
                    coded = coded.with_inputs_multiplied(tensors[self.scheme.input_factors])
                wanted = range(max(begin, run.start) - begin, min(end, run.stop) - begin)
                yield place, coded.rows(wanted)
                place += len(wanted)

    def _runs(self) -> Sequence[range]:
        """Return which rows of the checkpoint's matrix these are: runs of neighbours, in order."""
        part = self.part
        height, count = part.height // part.groups, part.described // part.groups
        begins = [group * height + part.begin for group in range(part.groups)]
        runs = [range(part.height)] if count == height else [range(begin, begin + count) for begin in begins]
        return runs if part.kept_rows is None else _rows_of(runs, part.kept_rows)
