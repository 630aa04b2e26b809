"""Mixture of experts on the host kernels: ``csrc/cpu/ops/experts.cpp``, eager or in a compiled step.

The reference is `quintet.executor.backends.cpu.ops.experts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.experts import Gate
from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.model_config.experts import MAX_CHOSEN, MAX_EXPERTS, Routing

NO_EXPERT = -1
"""Marks an empty place for a copy."""

_SIZE, _ADDRESS, _INT, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_double


class CExperts(ctypes.Structure):
    """Mirror of ``qt::ExpertsLayer``, which begins with its ``qt::Routing``: the fields of `Routing`, and the correction."""

    _fields_ = (
        *(
            (name, _SIZE)
            for name in ("experts", "chosen", "scoring", "groups", "chosen_groups", "group_best")
        ),
        ("correction", _ADDRESS),
        ("renormalise", _SIZE),
        *((name, _DOUBLE) for name in ("addend", "jitter", "scale")),
        ("scaled_inputs", _SIZE),
        *((name, _SIZE) for name in ("first", "kept", "rank", "ranks", "places")),
        *((name, _ADDRESS) for name in ("copies", "gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, _SIZE) for name in ("activation", "gate_up_inputs", "down_inputs")),
        *((name, _DOUBLE) for name in ("gate_factor", "gate_limit")),
        ("asked", _ADDRESS),
    )


@dataclass(frozen=True, slots=True)
class Homes:
    """Expert placement: each rank holds a contiguous range of experts, and places for copies of others."""

    rank: int = 0
    ranks: int = 1
    places: int = 0
    """Number of copies that each rank can hold."""


ALL_HERE = Homes()


@cache
def _experts_function() -> Callable[..., Any]:
    library = open_library()
    assert library is not None, "packed weights exist, so the library is loaded"
    check_layout(library, "qt_experts_bytes", ctypes.sizeof(CExperts))
    a, n, i = _ADDRESS, _SIZE, _INT
    return declare(library, "qt_op_experts", a, a, n, a, n, n, a, n, i)


class HostExperts:
    """A layer's experts in the kernels' layout; keeps the tensors that it points to alive."""

    def __init__(
        self,
        routing: Routing,
        gate: Gate,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        *,
        correction: torch.Tensor | None = None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        inputs: tuple[Inputs, Inputs] = (Inputs.SIXTEEN_BITS, Inputs.SIXTEEN_BITS),
        homes: Homes = ALL_HERE,
    ) -> None:
        """gate_up: paired, ``[2 width, hidden]`` each; down: ``[hidden, width]`` each. See also `ExpertTables` and `route`.

        Both list this rank's own experts first, then its places for copies. inputs: of gate and up, then of down.
        """
        first = routing.experts * homes.rank // homes.ranks
        kept = routing.experts * (homes.rank + 1) // homes.ranks - first
        assert len(gate_up) == len(down) == kept + homes.places, (len(gate_up), len(down), homes)
        assert routing.experts <= MAX_EXPERTS and routing.chosen <= MAX_CHOSEN, routing
        assert len(_shapes(gate_up)) == len(_shapes(down)) == 1, (_shapes(gate_up), _shapes(down))
        assert correction is None or correction.dtype is torch.float32, "the correction must be float32"
        tensors = (correction, gate_up_bias, down_bias)
        assert all(each is None or each.is_contiguous() for each in tensors)
        self._handles = [
            (_ADDRESS * len(weights))(*(each.handle for each in weights)) for weights in (gate_up, down)
        ]
        self._weights, self._biases, self._correction = (gate_up, down), (gate_up_bias, down_bias), correction
        addresses = [None if each is None else each.data_ptr() for each in tensors]
        self.hidden = down[0].columns
        self.homes = homes
        self.first, self.kept = first, kept
        """This rank's own experts: the first index, and their count."""
        self.copies = np.full((homes.ranks, homes.places), NO_EXPERT, np.int32)
        """``[ranks, places]``: expert of each copy. All ranks write the same table, between steps."""
        self.asked = np.zeros(routing.experts + 2, np.int64)
        """Total work so far, in rows: of each expert; of the busiest rank of each step; of all ranks. A small number of rows
        counts as the rows that take as long as reading the weights."""
        self.c = CExperts(
            **asdict(routing),
            correction=addresses[0],
            first=first,
            kept=kept,
            rank=homes.rank,
            ranks=homes.ranks,
            places=homes.places,
            copies=self.copies.ctypes.data,
            gate_up=ctypes.addressof(self._handles[0]),
            down=ctypes.addressof(self._handles[1]),
            gate_up_bias=addresses[1],
            down_bias=addresses[2],
            activation=gate.activation,
            gate_up_inputs=inputs[0],
            down_inputs=inputs[1],
            gate_factor=gate.factor,
            gate_limit=gate.limit,
            asked=self.asked.ctypes.data,
        )
        self.address = ctypes.addressof(self.c)

    def bytes_at(self, place: int) -> list[torch.Tensor]:
        """Return the tensors of the expert at an index of `kept` plus copies: uint8, of equal sizes for all experts."""
        weights = [packed[place].memory for packed in self._weights]
        return weights + [each[place].view(torch.uint8) for each in self._biases if each is not None]

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's weighted sum over the experts that its scores select.

        x: ``[tokens, hidden]``; scores: ``[tokens, experts]``; both in the dtype of the weights, or any for integer weights.
        """
        assert x.shape == (len(scores), self.hidden) and scores.shape[1] == self.c.experts, (
            x.shape,
            scores.shape,
        )
        assert x.dtype is scores.dtype and x.stride(1) == scores.stride(1) == 1
        y = torch.empty(x.shape, dtype=x.dtype)
        _experts_function()(
            *(self.address, x.data_ptr(), x.stride(0), scores.data_ptr(), scores.stride(0), len(x)),
            *(y.data_ptr(), y.stride(0), FLOAT_CODES[x.dtype]),
        )
        return y


def _shapes(weights: Sequence[PackedWeight]) -> set[tuple[WeightFormat, int, int, int]]:
    return {(each.format, each.columns, each.depth, each.group) for each in weights}
