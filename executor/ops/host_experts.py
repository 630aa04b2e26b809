"""Experts by the host kernels: ``csrc/cpu/experts.cpp``, alone or as an operation of a compiled step.

The reference is `quintet.executor.ops.experts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from quintet.executor.cards.routing import MAX_CHOSEN, MAX_EXPERTS, Routing
from quintet.executor.ops.experts import Gate
from quintet.executor.ops.host_dtypes import FLOAT_CODES
from quintet.executor.ops.host_library import check_layout, declare, open_library
from quintet.executor.ops.packed_weight import PackedWeight

_SIZE, _ADDRESS, _INT, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_double


class CExperts(ctypes.Structure):
    """Field by field ``qt::ExpertsLayer``, its ``qt::Routing`` first."""

    _fields_ = (
        ("experts", _SIZE),
        ("chosen", _SIZE),
        ("scoring", _SIZE),
        ("groups", _SIZE),
        ("chosen_groups", _SIZE),
        ("group_best", _SIZE),
        ("correction", _ADDRESS),
        ("renormalise", _SIZE),
        ("addend", _DOUBLE),
        ("jitter", _DOUBLE),
        ("scale", _DOUBLE),
        ("scaled_inputs", _SIZE),
        ("first", _SIZE),
        ("kept", _SIZE),
        ("gate_up", _ADDRESS),
        ("down", _ADDRESS),
        ("gate_up_bias", _ADDRESS),
        ("down_bias", _ADDRESS),
        ("activation", _SIZE),
        ("int8_activations", _SIZE),
        ("gate_factor", _DOUBLE),
        ("gate_limit", _DOUBLE),
    )


@cache
def _experts_function() -> Callable[..., Any]:
    library = open_library()
    assert library is not None, "there are packed weights, and so a library"
    check_layout(library, "qt_experts_bytes", ctypes.sizeof(CExperts))
    a, n, i = _ADDRESS, _SIZE, _INT
    return declare(library, "qt_op_experts", a, a, n, a, n, n, a, n, i)


class HostExperts:
    """A layer's experts as the kernels are told of them; keeps all that they point to."""

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
        int8_activations: bool = False,
        first: int = 0,
    ) -> None:
        """gate_up: paired, of ``[2 width, hidden]`` each; down: ``[hidden, width]``; the rest: see `ExpertTables`, `route`.

        first: of the experts that are here, where a rank has some; the others add nothing.
        """
        shapes = {(each.format, each.columns, each.depth, each.group) for each in gate_up}
        downs = {(each.format, each.columns, each.depth, each.group) for each in down}
        assert len(gate_up) == len(down) <= routing.experts - first, (len(gate_up), len(down), first)
        assert routing.experts <= MAX_EXPERTS, routing
        assert len(shapes) == len(downs) == 1 and routing.chosen <= MAX_CHOSEN, (shapes, downs, routing)
        assert correction is None or correction.dtype is torch.float32, "a correction is compared in fp32"
        tensors = (correction, gate_up_bias, down_bias)
        assert all(each is None or each.is_contiguous() for each in tensors)
        self._handles = [
            (_ADDRESS * len(weights))(*(each.handle for each in weights)) for weights in (gate_up, down)
        ]
        self._alive = (gate_up, down, tensors)
        addresses = [None if each is None else each.data_ptr() for each in tensors]
        self.hidden = down[0].columns
        self.c = CExperts(
            experts=routing.experts,
            chosen=routing.chosen,
            scoring=routing.scoring,
            groups=routing.groups,
            chosen_groups=routing.chosen_groups,
            group_best=routing.group_best,
            correction=addresses[0],
            renormalise=routing.renormalise,
            addend=routing.addend,
            jitter=routing.jitter,
            scale=routing.scale,
            scaled_inputs=routing.scaled_inputs,
            first=first,
            kept=len(down),
            gate_up=ctypes.addressof(self._handles[0]),
            down=ctypes.addressof(self._handles[1]),
            gate_up_bias=addresses[1],
            down_bias=addresses[2],
            activation=gate.activation,
            int8_activations=int8_activations,
            gate_factor=gate.factor,
            gate_limit=gate.limit,
        )
        self.address = ctypes.addressof(self.c)

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's sum over the experts that its scores choose.

        x: ``[tokens, hidden]``; scores: ``[tokens, experts]``, of the weights' number format or, where that is integer, any.
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
