"""Sources of matrix rows: one checkpoint tensor, or the tensors of a quantization format.

The inputs of a layer may be permuted before its packed weight, so that inputs of one group become adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
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
"""Values unpacked at a time: 16 MB as fp32, enough work for all threads."""


def floats_of(rows: Rows) -> torch.Tensor:
    """Return rows dequantized to floating point."""
    return rows if isinstance(rows, torch.Tensor) else rows.floats()


def _rows_of(runs: Sequence[range], kept: KeptRange) -> list[range]:
    """Return the ranges within ``runs`` that ``kept`` selects of their concatenation."""
    found, first = [], 0
    for run in runs:
        begin, end = max(kept.begin - first, 0), min(kept.end - first, len(run))
        if begin < end:
            found.append(run[begin:end])
        first += len(run)
    return found


class RowSource(Protocol):
    """Rows of a matrix and the checkpoint tensors that hold them."""

    @property
    def part(self) -> RowRange:
        """The rows."""

    @property
    def label(self) -> str:
        """Identifies source and transformation: part of the packed cache's key."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        """Expect the tensors; after the last one arrives, call ``fill(first, rows)`` for all rows in turn."""


@dataclass(frozen=True, slots=True)
class PlainRows:
    """A part of a floating-point weight. A `RowSource`."""

    part: RowRange
    depth: int

    @property
    def label(self) -> str:
        """The tensor's name alone if the part is the unchanged whole tensor."""
        part = self.part
        if part == RowRange(part.name, part.rows):
            return part.name
        marks = "T" * part.transposed + "U" * part.unit_rows
        kept = "".join(each.label for each in (part.kept_rows, part.kept_inputs) if each)
        return f"{part.name}[{part.begin}/{part.groups}/{part.height}{marks}{kept}]"

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        part = self.part
        expect(
            f"{part.name}.weight", part.weight_shape(self.depth), lambda tensor: fill(0, part.weight(tensor))
        )


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A part of a quantized weight. A `RowSource`."""

    part: RowRange
    depth: int
    scheme: Scheme

    @property
    def label(self) -> str:
        return f"{PlainRows(self.part, self.depth).label} {self.scheme}"

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
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
        """Yield the part's rows in chunks, each with the index of its first row."""
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
        """Return ranges of adjacent rows of the checkpoint's matrix, in order."""
        part = self.part
        height, count = part.height // part.groups, part.described // part.groups
        begins = [group * height + part.begin for group in range(part.groups)]
        runs = [range(part.height)] if count == height else [range(begin, begin + count) for begin in begins]
        return runs if part.kept_rows is None else _rows_of(runs, part.kept_rows)


def declare_rows(
    sources: Sequence[RowSource], plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]
) -> None:
    """Declare the sources of adjacent rows; ``fill`` gets the index of its first row among the rows of all sources."""
    begin = 0
    for source in sources:
        source.declare(plan, expect, partial(_fill_from, begin, fill))
        begin += source.part.rows


def _fill_from(begin: int, fill: Callable[[int, Rows], object], place: int, rows: Rows) -> None:
    fill(begin + place, rows)


def runs_of(keys: Iterable[object]) -> list[tuple[int, int]]:
    """Return begin and end of each run of equal keys."""
    found, begin = [], 0
    for _, equal in groupby(keys):
        end = begin + len(list(equal))
        found.append((begin, end))
        begin = end
    return found


def declare_order(sources: list[RowSource], depth: int, plan: WeightPlan) -> torch.Tensor | None:
    """Return the order, int32 ``[depth]``, filled by a loader; None if the groups are contiguous.

    The loader fills it also for a mapped packed weight. All sources must have one order, since they share one x.
    """
    ordered = [source for source in sources if isinstance(source, CodedRows) and is_ordered(source)]
    if not ordered:
        return None
    order = torch.full((depth,), -1, dtype=torch.int32, device=plan.device)
    for source in ordered:
        name, group = f"{source.part.name}.{source.scheme.order}", source.scheme.group or depth
        plan.expect(name, (depth,), partial(_fill, order, group, source.part.name), num_bytes=order.nbytes)
    return order


def is_ordered(source: RowSource) -> bool:
    """Return True if the groups of a source's scales are not contiguous inputs."""
    return isinstance(source, CodedRows) and source.scheme.order is not None


def sorted_inputs(groups: torch.Tensor) -> torch.Tensor:
    """Return the inputs sorted by group (stable): int64 ``[depth]``."""
    return torch.argsort(groups, stable=True)


def _fill(order: torch.Tensor, group: int, layer: str, groups: torch.Tensor) -> None:
    its = sorted_inputs(groups).to(order.device)
    groups = groups.to(order.device)
    if not torch.equal(groups[its].long(), torch.arange(len(groups), device=order.device) // group):
        raise ConfigError(f"layer {layer!r}: g_idx must have {group} inputs in each group")
    if int(order[0]) < 0:
        order.copy_(its)
    elif not torch.equal(order, its.int()):
        raise ConfigError(
            f"layer {layer!r}: its order of inputs differs from that of the layer fused with it: quantize the"
            " model again with desc_act false, or static_groups"
        )
