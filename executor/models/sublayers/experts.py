"""Mixture of experts: a router selects experts per token; a shared expert, if present, processes every token.

Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017. Shared
experts: Dai et al., "DeepSeekMoE", 2024.

`gate_up_of` and `down_of` map a checkpoint's tensors to the rows of each expert's matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quintet.executor.checkpoints.quant.decode import Coded, mxfp4
from quintet.executor.checkpoints.quant.formats.scheme import Packing, Scheme
from quintet.executor.checkpoints.quant.stack import StackPiece, StackShape
from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation, MlpLayout, MlpSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.experts import Experts, Gate
from quintet.executor.models.layers.linear import GatedActivation, Linear
from quintet.executor.models.sublayers.feed_forward import FeedForward
from quintet.executor.models.sublayers.scope import Scope

_MX = Scheme(stored=(), codes=Packing(4), group=32, is_fp4=True)
"""Microscaling FP4 (MXFP4)."""
_SMALL_EXPONENTS = (118, 122)
"""Exponent range of dummy weights."""

Index = slice | tuple[slice, slice]
"""Index of one expert's checkpoint tensor that gives rows of its matrix."""
_WHOLE = slice(None)


class MixtureOfExperts:
    """A `quintet.executor.models.sublayers.layer.Sublayer`."""

    def __init__(self, scope: Scope, spec: ExpertsSpec) -> None:
        names, count = scope.names, spec.routing.experts
        self._router = scope.linear(
            [scope.part(names.router, count)], scope.hidden_size, biased=spec.router_bias, is_exact=True
        )
        self._experts = Experts(
            scope.setting.quantization,
            scope.weights,
            spec.routing,
            _gate_of(spec),
            gate_up_of(scope, spec),
            down_of(scope, spec),
            scope.name(names.correction) if spec.corrected else None,
            spec.correction_in_row,
            share=scope.share,
        )
        self._shared = None
        if spec.shared_width is not None:
            layout = MlpLayout.STACKED if spec.shared_stacked else MlpLayout.SEPARATE
            shared = MlpSpec(width=spec.shared_width, activation=Activation.SILU, layout=layout)
            self._shared = FeedForward(replace(scope, names=_names_of_shared(names)), shared)
        self._shared_router: Linear | None = None
        if spec.shared_gated:
            self._shared_router = scope.linear(
                [scope.part(names.shared_router, 1)], scope.hidden_size, is_exact=True
            )

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        y = ops.experts(self._experts, x, ops.linear(self._router, x))
        if self._shared is None:
            return y
        shared = self._shared(ops, x)
        if self._shared_router is not None:
            gate = ops.activation(ops.linear(self._shared_router, x), Activation.SIGMOID)
            shared = ops.multiply(shared, gate)
        return ops.add(y, shared)


def _gate_of(spec: ExpertsSpec) -> Gate:
    if spec.clamp is None:
        return Gate(activation=GatedActivation.SILU_AND_MUL)
    factor, limit = spec.clamp
    return Gate(activation=GatedActivation.CLAMPED_SWIGLU, factor=factor, limit=limit)


def _names_of_shared(names: Names) -> Names:
    """Return ``names`` with the shared expert's tensors as those of a feed-forward."""
    return replace(
        names,
        gate=names.shared_gate,
        up=names.shared_up,
        gate_up=names.shared_gate_up,
        down=names.shared_down,
    )


def gate_up_of(scope: Scope, spec: ExpertsSpec) -> StackShape:
    """Return the source of each expert's gates and ups: a matrix ``[2 width, hidden]``, gates first.

    A rank has some whole experts, or some gates and ups of each.
    """
    names, hidden, wide = scope.names, scope.hidden_size, spec.width
    own, kept = scope.share.of_experts(spec.routing.experts), scope.share.of_experts_width(wide)
    name = scope.name(names.experts_gate_up)
    gates, ups = slice(kept.begin, kept.end), slice(wide + kept.begin, wide + kept.end)
    if spec.layout in {ExpertsLayout.ALTERNATING, ExpertsLayout.MXFP4}:
        gates, ups = (slice(2 * kept.begin + first, 2 * kept.end, 2) for first in (0, 1))
    both = ((0, gates), (kept.count, ups))
    match spec.layout:
        case ExpertsLayout.SEPARATE:
            rows = _WHOLE if kept.is_all else gates
            weights = _each(scope, names.expert_gate, own, (wide, hidden), 0, rows)
            weights += _each(scope, names.expert_up, own, (wide, hidden), kept.count, rows)
        case ExpertsLayout.STACKED:
            weights = [_stacked(name, own, (2 * wide, hidden), begin, rows) for begin, rows in both]
        case ExpertsLayout.TRANSPOSED | ExpertsLayout.ALTERNATING:
            weights = [_transposed(name, own, (hidden, 2 * wide), begin, rows) for begin, rows in both]
        case ExpertsLayout.MXFP4:
            weights = [_mx(name, own, 2 * wide, hidden, begin, rows) for begin, rows in both]
    biases = []
    if spec.biased:
        name_of_bias = scope.name(names.experts_gate_up_bias)
        biases = [_stacked(name_of_bias, own, (2 * wide,), begin, rows) for begin, rows in both]
    return StackShape(
        label=f"{scope.name('experts')}: gates, ups, {spec.layout}{kept.label}{_label(own)}",
        experts=own.count,
        places=scope.share.places,
        columns=2 * kept.count,
        depth=hidden,
        paired=True,
        weights=weights,
        biases=biases,
    )


def down_of(scope: Scope, spec: ExpertsSpec) -> StackShape:
    """Return the source of each expert's down projection ``[hidden, width]``; a rank has some, or some columns of each."""
    names, hidden, wide = scope.names, scope.hidden_size, spec.width
    own, kept = scope.share.of_experts(spec.routing.experts), scope.share.of_experts_width(wide)
    name = scope.name(names.experts_down)
    inputs: Index = _WHOLE if kept.is_all else (_WHOLE, slice(kept.begin, kept.end))
    match spec.layout:
        case ExpertsLayout.SEPARATE:
            weights = _each(scope, names.expert_down, own, (hidden, wide), 0, inputs)
        case ExpertsLayout.STACKED:
            weights = [_stacked(name, own, (hidden, wide), 0, inputs)]
        case ExpertsLayout.TRANSPOSED | ExpertsLayout.ALTERNATING:
            weights = [_transposed(name, own, (wide, hidden), 0, inputs)]
        case ExpertsLayout.MXFP4:
            assert kept.is_all, "columns of quantized experts cannot be divided"
            weights = [_mx(name, own, hidden, wide, 0, _WHOLE)]
    biases = []
    if spec.biased:
        biases = [_stacked(scope.name(names.experts_down_bias), own, (hidden,), 0, _WHOLE)]
    return StackShape(
        label=f"{scope.name('experts')}: downs, {spec.layout}{kept.label}{_label(own)}",
        experts=own.count,
        places=scope.share.places,
        columns=hidden,
        depth=kept.count,
        paired=False,
        weights=weights,
        biases=biases,
    )


def _label(own: KeptRange) -> str:
    return "" if own.is_all else f" of experts{own.label}"


def _each(
    scope: Scope, name: str, own: KeptRange, shape: tuple[int, int], begin: int, rows: Index
) -> list[StackPiece]:
    """Return the pieces of a tensor per expert that this rank keeps."""
    names = [scope.name(name).format(expert=expert) for expert in range(own.whole)]
    scope.weights.on_other_ranks.update(names[: own.begin], names[own.end :])
    return [
        StackPiece(
            names=(f"{its}.weight",),
            shapes=(shape,),
            first=place,
            count=1,
            begin=begin,
            take=lambda tensors, _: tensors[0][rows],
            is_whole=rows == _WHOLE,
        )
        for place, its in enumerate(names[own.begin : own.end])
    ]


def _stacked(name: str, own: KeptRange, shape: tuple[int, ...], begin: int, rows: Index) -> StackPiece:
    """Return a piece of one tensor of all experts. shape: of one expert."""
    return StackPiece(
        names=(name,),
        shapes=((own.whole, *shape),),
        first=0,
        count=own.count,
        begin=begin,
        take=lambda tensors, expert: tensors[0][own.begin + expert][rows],
    )


def _transposed(name: str, own: KeptRange, shape: tuple[int, int], begin: int, rows: Index) -> StackPiece:
    """Return a piece of one tensor of all experts, with transposed matrices."""
    piece = _stacked(name, own, shape, begin, rows)
    return replace(piece, take=lambda tensors, expert: tensors[0][own.begin + expert].t()[rows])


def _mx(name: str, own: KeptRange, columns: int, depth: int, begin: int, rows: Index) -> StackPiece:
    """Return a piece of two tensors: 4-bit values and their exponents."""
    blocks = depth // _MX.group

    def take(tensors: Sequence[torch.Tensor], expert: int) -> Coded:
        codes, exponents = (tensor[own.begin + expert][rows] for tensor in tensors)
        return mxfp4(codes, exponents)

    return StackPiece(
        names=(f"{name}_blocks", f"{name}_scales"),
        shapes=((own.whole, columns, blocks, _MX.group // 2), (own.whole, columns, blocks)),
        first=0,
        count=own.count,
        begin=begin,
        take=take,
        bytes_between=((0, 255), _SMALL_EXPONENTS),
        scheme=_MX,
    )
