"""Common parts of mixers with a state: divided rows, float32 parameters, the short convolution before the scan."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.state_specs import StateNeed
from quintet.executor.models.layers.linear import Linear, RowRange
from quintet.executor.models.layers.states import CausalConv, StatePart
from quintet.executor.models.sublayers.scope import Scope


def tensor_name(scope: Scope, name: str) -> str:
    """Return the name of a mixer's tensor within its layer."""
    return f"{scope.names.state_mixer}.{name}"


class KeptRows:
    """Consecutive kinds of rows in a tensor, and the range of each kind that this rank keeps."""

    def __init__(self, *kinds: KeptRange) -> None:
        self._kinds = kinds
        self._begins = list(accumulate((kept.whole for kept in kinds), initial=0))
        self._is_all = all(kept.is_all for kept in kinds)

    @property
    def whole(self) -> int:
        """Number of rows of the tensor."""
        return self._begins[-1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the kept rows of a complete tensor."""
        if self._is_all:
            return tensor
        kinds = zip(self._begins, self._kinds, strict=False)
        return torch.cat([tensor[begin + kept.begin : begin + kept.end] for begin, kept in kinds])

    def parts(self, scope: Scope, name: str) -> list[RowRange]:
        """Return the kept rows as parts of one of the mixer's linear layers."""
        name = tensor_name(scope, name)
        if self._is_all:
            return [scope.part(name, self.whole)]
        kinds = zip(self._begins, self._kinds, strict=False)
        return [scope.part(name, kept.whole, self.whole, begin).keeping(kept) for begin, kept in kinds]


def parameter(
    scope: Scope,
    name: str,
    rows: KeptRows,
    *rest: int,
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """Declare a checkpoint parameter ``[rows, *rest]``; return ``take`` of its kept rows, filled on loading.

    The result is float32.
    """
    shape = (rows.whole, *rest)
    whole = torch.empty(take(rows.take(torch.zeros(shape))).shape, device=scope.weights.device)

    def fill(tensor: torch.Tensor) -> None:
        whole.copy_(take(rows.take(tensor).float()))

    scope.weights.expect(scope.name(tensor_name(scope, name)), shape, fill, num_bytes=4 * whole.numel())
    return whole


def decay(scope: Scope, rows: KeptRows, *rest: int) -> torch.Tensor:
    """Declare the decay parameter ``A_log``; return ``-exp(A_log)``, transposed if it is a matrix."""
    return parameter(scope, "A_log", rows, *rest, take=lambda tensor: -torch.exp(tensor).t())


def output(scope: Scope, name: str, kept: KeptRange, rows: int, *, biased: bool = False) -> Linear:
    """Declare a linear layer with inputs divided over ranks; ``kept`` is this rank's range."""
    part = scope.part(tensor_name(scope, name), rows).of_inputs(kept, scope.share.own_leaves)
    return scope.linear([part], kept.count, biased=biased)


def conv_part(scope: Scope, need: StateNeed) -> StatePart:
    """Return the convolution's part of the layer's state."""
    assert scope.layer is not None
    return StatePart(index=scope.layer, offset=0, shape=need.conv)


def scan_part(scope: Scope, need: StateNeed) -> StatePart:
    """Return the scan's part of the layer's state."""
    assert scope.layer is not None
    return StatePart(
        index=scope.layer, offset=need.scan_offset(scope.setting.dtype.itemsize), shape=need.scan
    )


def convolution(
    scope: Scope,
    need: StateNeed,
    name: str,
    channels: KeptRows,
    *,
    biased: bool,
    silu: bool,
    factors: torch.Tensor | None = None,
) -> CausalConv:
    """Declare a convolution. factors: ``[channels]``, multipliers of its inputs; None for 1."""
    taps = need.conv[0] + 1

    def by_tap(weight: torch.Tensor) -> torch.Tensor:
        by_taps = weight.squeeze(1).t()
        return by_taps if factors is None else by_taps * factors.to(by_taps.device)

    return CausalConv(
        state=conv_part(scope, need),
        weight=parameter(scope, f"{name}.weight", channels, 1, taps, take=by_tap),
        bias=parameter(scope, f"{name}.bias", channels) if biased else None,
        silu=silu,
    )
