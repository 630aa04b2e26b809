"""Where a checkpoint has the weights of experts: from the names of its tensors to the rows of each expert's matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quintet.executor.cards.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.quant.stack import StackPiece, StackShape

_MX_BLOCK = 32
"""Numbers that share an exponent."""
_MX_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What 4 bits mean: a sign, two bits of exponent, one of mantissa."""
_MX_BIAS = 127

Rows = Callable[[torch.Tensor], torch.Tensor]
"""From one expert's tensor as the checkpoint has it to rows of its matrix."""


def gate_up_of(scope: Scope, spec: ExpertsSpec) -> StackShape:
    """Return where each expert's gates and ups are: a matrix ``[2 width, hidden]``, gates first."""
    names, count, hidden, wide = scope.names, spec.routing.experts, scope.hidden_size, spec.width
    name = scope.name(names.experts_gate_up)
    gates, ups = partial(_columns, 0, wide), partial(_columns, wide, 2 * wide)
    if spec.layout in {ExpertsLayout.ALTERNATING, ExpertsLayout.MXFP4}:
        gates, ups = partial(_turns, 0), partial(_turns, 1)
    both = ((0, gates), (wide, ups))
    match spec.layout:
        case ExpertsLayout.SEPARATE:
            weights = _each(scope, names.expert_gate, count, (wide, hidden), 0)
            weights += _each(scope, names.expert_up, count, (wide, hidden), wide)
        case ExpertsLayout.STACKED:
            weights = [_stacked(name, (count, 2 * wide, hidden), begin, rows) for begin, rows in both]
        case ExpertsLayout.TRANSPOSED | ExpertsLayout.ALTERNATING:
            weights = [
                _stacked(name, (count, hidden, 2 * wide), begin, _transposed(rows)) for begin, rows in both
            ]
        case ExpertsLayout.MXFP4:
            weights = [_mx(name, count, 2 * wide, hidden, begin, rows) for begin, rows in both]
    biases = []
    if spec.biased:
        name_of_bias = scope.name(names.experts_gate_up_bias)
        biases = [_stacked(name_of_bias, (count, 2 * wide), begin, rows) for begin, rows in both]
    return StackShape(
        label=f"{scope.name('experts')}: gates, ups, {spec.layout}",
        experts=count,
        columns=2 * wide,
        depth=hidden,
        paired=True,
        weights=weights,
        biases=biases,
    )


def down_of(scope: Scope, spec: ExpertsSpec) -> StackShape:
    """Return where each expert's last layer is: a matrix ``[hidden, width]``."""
    names, count, hidden, wide = scope.names, spec.routing.experts, scope.hidden_size, spec.width
    name = scope.name(names.experts_down)
    match spec.layout:
        case ExpertsLayout.SEPARATE:
            weights = _each(scope, names.expert_down, count, (hidden, wide), 0)
        case ExpertsLayout.STACKED:
            weights = [_stacked(name, (count, hidden, wide), 0, _as_they_are)]
        case ExpertsLayout.TRANSPOSED | ExpertsLayout.ALTERNATING:
            weights = [_stacked(name, (count, wide, hidden), 0, _transposed(_as_they_are))]
        case ExpertsLayout.MXFP4:
            weights = [_mx(name, count, hidden, wide, 0, _as_they_are)]
    biases = []
    if spec.biased:
        biases = [_stacked(scope.name(names.experts_down_bias), (count, hidden), 0, _as_they_are)]
    return StackShape(
        label=f"{scope.name('experts')}: downs, {spec.layout}",
        experts=count,
        columns=hidden,
        depth=wide,
        paired=False,
        weights=weights,
        biases=biases,
    )


def _as_they_are(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _columns(begin: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[begin:end]


def _turns(first: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[first::2]


def _transposed(rows: Rows) -> Rows:
    return lambda tensor: rows(tensor.t())


def _each(scope: Scope, name: str, count: int, shape: tuple[int, int], begin: int) -> list[StackPiece]:
    """Return the pieces of a tensor of each expert."""
    return [
        StackPiece(
            names=(f"{scope.name(name).format(expert=expert)}.weight",),
            shapes=(shape,),
            first=expert,
            count=1,
            begin=begin,
            take=lambda tensors, _: tensors[0],
            is_whole=True,
        )
        for expert in range(count)
    ]


def _stacked(name: str, shape: tuple[int, ...], begin: int, rows: Rows) -> StackPiece:
    """Return a piece of one tensor of all experts."""
    return StackPiece(
        names=(name,),
        shapes=(shape,),
        first=0,
        count=shape[0],
        begin=begin,
        take=lambda tensors, expert: rows(tensors[0][expert]),
    )


def _mx(name: str, count: int, columns: int, depth: int, begin: int, rows: Rows) -> StackPiece:
    """Return a piece of two tensors, 4-bit numbers and their exponents."""
    blocks = depth // _MX_BLOCK

    def take(tensors: Sequence[torch.Tensor], expert: int) -> torch.Tensor:
        return _mx_numbers(rows(tensors[0][expert]), rows(tensors[1][expert]))

    return StackPiece(
        names=(f"{name}_blocks", f"{name}_scales"),
        shapes=((count, columns, blocks, _MX_BLOCK // 2), (count, columns, blocks)),
        first=0,
        count=count,
        begin=begin,
        take=take,
        bytes_between=((0, 255), (_MX_BIAS - 9, _MX_BIAS - 5)),
    )


def _mx_numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16 ``[rows, depth]``, which holds each number exactly. blocks: uint8 ``[rows, depth / 32, 16]``, the first of two
    numbers in the low bits; scales: uint8 ``[rows, depth / 32]``, powers of two from 2^-127 on."""
    numbers = torch.tensor(_MX_NUMBERS, dtype=torch.bfloat16)
    low, high = numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]
    values = torch.stack((low, high), dim=-1).flatten(2)  # [rows, blocks, 32]
    return torch.ldexp(values, scales.int()[..., None] - _MX_BIAS).to(torch.bfloat16).flatten(1)
