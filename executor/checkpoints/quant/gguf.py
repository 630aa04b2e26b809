"""Quantization of GGUF files: each layer keeps the types of its tensors.

A layer with parts of different types is several packed weights; in some layers of Q4_K_M the values differ from queries
and keys. Types without a packed format, and tensors that are not plain row matrices, are kept in the model's number
format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from quintet.executor.checkpoints.gguf.types import BY_NAME, GgmlType
from quintet.executor.checkpoints.gguf.weights import BLOCKS
from quintet.executor.checkpoints.quant.blocks import PACKED_FORMATS, Blocks
from quintet.executor.checkpoints.quant.coded import (
    KEPT_BLOCKS,
    StoredRows,
    coded_linear,
    coded_stack,
    multiplies,
)
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.packed import PackedLinear, library_for, packed_by_part
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS, PackedFormat
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.quant.source import Expect, PlainRows, Rows
from quintet.executor.checkpoints.quant.stack import (
    PackedStack,
    SourcePiece,
    StackMethod,
    StackPiece,
    StackRows,
    StackShape,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError

_DUMMIES = (0, 0)
"""Range of dummy bytes: unused, since GGUF always needs a file."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A part of a weight in blocks. A `quintet.executor.checkpoints.quant.source.RowSource`."""

    part: RowRange
    depth: int
    kind: GgmlType

    @property
    def label(self) -> str:
        return f"{PlainRows(self.part, self.depth).label} {self.kind.name}"

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, Rows], object]) -> None:
        part, kept, kind = self.part, self.part.kept_inputs, self.kind

        def take(raw: torch.Tensor) -> None:
            if kept is not None:
                raw = raw[:, kind.num_bytes(kept.begin) : kind.num_bytes(kept.end)].contiguous()
            fill(0, Blocks(part.bias(raw), kind))

        name, depth = f"{part.name}{BLOCKS}", self.depth if kept is None else kept.whole
        expect(name, (part.height, kind.num_bytes(depth)), take)
        plan.as_codes(name, (kind.name,), _DUMMIES)


class GgufQuantization:
    """See `quintet.executor.checkpoints.quant.method.Quantization`."""

    def __init__(
        self, contents: Mapping[str, Entry] | None, rest: Quantization, on_device: bool = False
    ) -> None:
        """contents: the file's tensors by the model's names, None if no file is read; rest: makes the floating-point
        layers.

        on_device: device kernels multiply.
        """
        self._contents = contents or {}
        self._on_device = on_device
        self._rest = rest

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        library = library_for(plan)
        sources = [self._source(part, shape.depth, plan) for part in shape.parts]
        rows = [source or plain for source, plain in zip(sources, shape.sources, strict=True)]
        if self._on_device:
            kept = [None if shape.is_exact else _kept(source, plan) for source in sources]
            return coded_linear(shape, plan, rows, kept) or self._rest.linear(shape, plan)
        packed_formats = [_packed_format(source, plan) for source in sources]
        if library is None or shape.is_exact or not any(sources):
            return self._rest.linear(shape, plan)
        if shape.activation:
            assert len(set(packed_formats)) == 1, packed_formats  # the model checks `pairs` first
            return PackedLinear(library, shape, plan, packed_formats[0], rows)
        return packed_by_part(library, shape, plan, packed_formats, rows)

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        """See `Quantization.embedding`. The packed table takes a third of the memory and needs no computation at start."""
        library = library_for(plan)
        (source,) = (self._source(part, shape.depth, plan) for part in shape.parts)
        if self._on_device or library is None or source is None:
            return None
        return PackedLinear(library, shape, plan, PACKED_FORMATS[source.kind.name], [source])

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        """See `Quantization.pairs`. Gates and ups of different types are packed separately."""
        sources = [self._source(part, shape.depth, plan) for part in shape.parts]
        packs = not self._on_device and library_for(plan) is not None
        return not packs or len({_packed_format(source, plan) for source in sources}) == 1

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        library = library_for(plan)
        sources = [self._source_of_piece(piece, plan) for piece in shape.weights]
        pieces = [
            SourcePiece(source, piece.first, piece.begin)
            for source, piece in zip(sources, shape.weights, strict=True)
            if source is not None and isinstance(piece, StackPiece)
        ]
        if self._on_device:
            kept = [_kept(source, plan) for source in sources]
            return coded_stack(replace(shape, weights=pieces), plan, kept) or self._rest.stack(shape, plan)
        kinds = {None if source is None else source.kind.name for source in sources}
        kind = kinds.pop() if len(kinds) == 1 else None
        if library is None or shape.is_exact or kind is None:
            return self._rest.stack(shape, plan)
        shape = replace(shape, weights=pieces, label=f"{shape.label} of {kind}")
        return PackedStack(library, shape, plan, PACKED_FORMATS[kind])

    def _source_of_piece(self, piece: StackRows, plan: WeightPlan) -> BlockRows | None:
        """Return the piece's rows in blocks; None if it is not one whole tensor, or not stored in blocks."""
        if not isinstance(piece, StackPiece) or not piece.is_whole or not piece.names[0].endswith(".weight"):
            return None
        ((rows, depth),) = piece.shapes
        return self._source(RowRange(piece.names[0].removesuffix(".weight"), rows), depth, plan)

    def _source(self, part: RowRange, depth: int, plan: WeightPlan) -> BlockRows | None:
        """Return the part's rows in blocks; None if only floating-point rows are available."""
        entry = self._contents.get(f"{part.name}{BLOCKS}")
        if entry is None or entry.dtype not in PACKED_FORMATS or part.transposed or part.unit_rows:
            return None
        kind, kept = BY_NAME[entry.dtype], part.kept_inputs
        if entry.shape != (part.height, kind.num_bytes(depth if kept is None else kept.whole)):
            return None
        if kept is not None and (kept.begin % kind.block or kept.end % kind.block):
            raise ConfigError(
                f"layer {part.name!r}: a rank would have inputs {kept.begin} to {kept.end}, not whole blocks of {kind.block}"
                f" ({kind.name}): lower --tensor-parallel-size"
            )
        return BlockRows(part, depth, kind)


def _packed_format(source: BlockRows | None, plan: WeightPlan) -> PackedFormat:
    return PackedFormat(FLOAT_FORMATS[plan.dtype]) if source is None else PACKED_FORMATS[source.kind.name]


def _kept(source: BlockRows | None, plan: WeightPlan) -> StoredRows | None:
    if source is None or not multiplies(source.depth, plan.dtype):
        return None
    return KEPT_BLOCKS[source.kind.name]
