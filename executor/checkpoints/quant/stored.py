"""Quantization stored in the checkpoint: each layer keeps the codes and scales of its checkpoint tensors.

`quintet.executor.checkpoints.quant.formats` describes them. Layers that the format leaves unquantized are made by the
other quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quintet.executor.checkpoints.quant.coded import coded_linear, coded_stack, kept_of
from quintet.executor.checkpoints.quant.fill import packed_format_of
from quintet.executor.checkpoints.quant.formats.cut import why_not
from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.packed import (
    PackedLinear,
    RowMajorLinear,
    library_for,
    packed_by_part,
)
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS, PackedFormat
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.checkpoints.quant.source import CodedRows, Expect, PlainRows, Rows, RowSource, floats_of
from quintet.executor.checkpoints.quant.stack import (
    PackedStack,
    RowMajorStack,
    SourcePiece,
    StackMethod,
    StackPiece,
    StackRows,
    StackShape,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.plan import WeightPlan


class StoredQuantization(Quantization):
    """See `quintet.executor.checkpoints.quant.method.Quantization`."""

    def __init__(
        self,
        stored: Format,
        rest: Quantization,
        contents: Mapping[str, Entry] | None = None,
        rounds: bool = False,
        on_device: bool = False,
    ) -> None:
        """rest: makes the layers that the checkpoint stores in floating point; contents: checkpoint tensors, None if no
        checkpoint is read.

        rounds: ``rest`` also makes expert layers that the model's own layout stores in codes; on_device: device
        kernels multiply.
        """
        self._format = stored
        self._rest = rest
        self._contents = contents
        self._rounds = rounds
        self._on_device = on_device

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        self._ignore(plan)
        if self._contents is None and shape.is_exact:  # layers sensitive to rounding are never quantized
            return self._rest.linear(shape, plan)
        sources = [self._source(part, shape.depth, plan, shape.is_output_layer) for part in shape.parts]
        if not any(isinstance(source, CodedRows) for source in sources):
            return self._rest.linear(shape, plan)
        if not shape.biased:
            self._expect_no_biases(shape.parts, plan)
        library, schemes = library_for(plan), [_scheme_of(source) for source in sources]
        if self._on_device:
            kept = [kept_of(scheme, shape.depth, plan.dtype) for scheme in schemes]
            return coded_linear(shape, plan, sources, kept) or RowMajorLinear(shape, plan, sources)
        if library is None:
            return RowMajorLinear(shape, plan, sources)
        packed_format = packed_format_of(schemes, plan.dtype)
        if packed_format.weight_format.is_float and not shape.activation:  # no format holds all parts exactly
            by_part = [packed_format_of([scheme], plan.dtype) for scheme in schemes]
            return packed_by_part(library, shape, plan, by_part, sources)
        return PackedLinear(library, shape, plan, packed_format, sources)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        self._ignore(plan)
        pieces = [self._piece(piece, plan) for piece in shape.weights]
        schemes = [None if self._rounds else _scheme_of_piece(piece) for piece in pieces]
        if not any(schemes) and pieces == list(shape.weights):
            return self._rest.stack(shape, plan)
        labels = "+".join(dict.fromkeys(str(scheme) for scheme in schemes))
        shape = replace(shape, weights=pieces, label=f"{shape.label} of {labels}")
        is_ordered = any(scheme is not None and scheme.order is not None for scheme in schemes)
        if self._on_device:  # each expert would need its own order of inputs
            kept = [None if is_ordered else kept_of(scheme, shape.depth, plan.dtype) for scheme in schemes]
            return coded_stack(shape, plan, kept) or RowMajorStack(shape, plan)
        library = library_for(plan)
        if library is None:
            return RowMajorStack(shape, plan)
        packed_format = packed_format_of(schemes, plan.dtype)
        has_outliers = any(scheme is not None and scheme.outliers for scheme in schemes)
        if shape.is_exact or is_ordered or has_outliers:
            packed_format = PackedFormat(FLOAT_FORMATS[plan.dtype])  # see `linear`
        return PackedStack(library, shape, plan, packed_format)

    def _ignore(self, plan: WeightPlan) -> None:
        """Add the format's ignored tensors to those of the plan."""
        if not set(self._format.ignored) <= set(plan.ignored):
            plan.ignored += tuple(self._format.ignored)

    def _scheme(self, part: RowRange, depth: int, plan: WeightPlan, is_output_layer: bool) -> Scheme | None:
        kept = part.kept_inputs
        whole = depth if kept is None else kept.whole
        layer = StoredLayer(part.name, part.height, whole, is_output_layer, self._contents, plan.prefix)
        scheme = self._format.scheme(layer)
        if scheme is not None and kept is not None:
            reason = why_not(scheme, kept)
            if reason is not None:
                layer.refuse(f"{reason}: lower --tensor-parallel-size")
        if scheme is not None and (part.unit_rows or (part.transposed and not _is_transposed(scheme))):
            layer.refuse(
                f"layers with transposed or normalised rows are not supported in {self._format.words}:"
                " use the original checkpoint"
            )
        return scheme

    def _source(
        self, part: RowRange, depth: int, plan: WeightPlan, is_output_layer: bool = False
    ) -> RowSource:
        scheme = self._scheme(part, depth, plan, is_output_layer)
        return PlainRows(part, depth) if scheme is None else CodedRows(part, depth, scheme)

    def _piece(self, piece: StackRows, plan: WeightPlan) -> StackRows:
        """Return a source of the piece's rows in the format's tensors; the piece itself if the format does not store it."""
        if (
            not isinstance(piece, StackPiece)
            or len(piece.names) != 1
            or not piece.names[0].endswith(".weight")
            or len(piece.shapes[0]) != 2
        ):
            return piece
        rows, depth = piece.shapes[0]
        source = self._source(RowRange(piece.names[0].removesuffix(".weight"), rows), depth, plan)
        if not isinstance(source, CodedRows):
            return piece
        return SourcePiece(source, piece.first, piece.begin) if piece.is_whole else CodedPiece(source, piece)

    def _expect_no_biases(self, parts: Sequence[RowRange], plan: WeightPlan) -> None:
        """Accept checkpoint biases of layers that have none in the architecture, if they are zeros; old checkpoints have
        them."""
        for part in parts:
            layer = StoredLayer(part.name, part.height, 0, False, self._contents, plan.prefix)

            def check(bias: torch.Tensor, layer: StoredLayer = layer) -> None:
                if bool(bias.any()):
                    layer.refuse("the checkpoint has a bias, but config.json's architecture has none")

            if layer.entry("bias") is not None:
                plan.expect(f"{part.name}.bias", (part.height,), check)


@dataclass(frozen=True, slots=True)
class CodedPiece:
    """Rows of several experts, or of heads, from a quantized layer of the checkpoint: dequantized. A `StackRows`."""

    source: CodedRows
    piece: StackPiece
    """Builds the matrices from the layer's dequantized rows."""

    def declare(self, plan: WeightPlan, expect: Expect, fill: Callable[[int, int, Rows], object]) -> None:
        piece, part = self.piece, self.source.part
        whole = torch.empty(0)

        def collect(place: int, rows: Rows) -> None:
            nonlocal whole
            if place == 0:
                whole = torch.empty(part.rows, self.source.depth, dtype=plan.dtype)
            floats = floats_of(rows)
            whole[place : place + len(floats)] = floats
            if place + len(floats) == part.rows:
                for i in range(piece.count):
                    fill(piece.first + i, piece.begin, piece.take([whole], i))
                whole = torch.empty(0)

        self.source.declare(plan, expect, collect)


def _scheme_of_piece(piece: StackRows) -> Scheme | None:
    """Return the scheme of a piece's rows; None if they are floating point or are dequantized."""
    if isinstance(piece, SourcePiece):
        return _scheme_of(piece.source)
    return piece.scheme if isinstance(piece, StackPiece) else None


def _is_transposed(scheme: Scheme) -> bool:
    return scheme.codes is not None and scheme.codes.transposed


def _scheme_of(source: RowSource) -> Scheme | None:
    return source.scheme if isinstance(source, CodedRows) else None
