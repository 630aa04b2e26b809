"""What mixers with a state share: parameters in float32, and the short convolution before the scan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.cards.state_specs import StateNeed
from quintet.executor.layers.states import CausalConv, StatePart
from quintet.executor.models.blocks.scope import Scope


def below(scope: Scope, name: str) -> str:
    """Return the name of one of the mixer's tensors, within its layer."""
    return f"{scope.names.state_mixer}.{name}"


def numbers(
    scope: Scope,
    name: str,
    shape: tuple[int, ...],
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """Declare a parameter of this shape in the checkpoint; return what ``take`` makes of it, in float32, once it is loaded."""
    like = take(torch.zeros(shape))
    whole = torch.empty(like.shape, device=scope.weights.device)

    def fill(tensor: torch.Tensor) -> None:
        whole.copy_(take(tensor.float()))

    scope.weights.expect(scope.name(below(scope, name)), shape, fill, num_bytes=4 * whole.numel())
    return whole


def fading(scope: Scope, *shape: int) -> torch.Tensor:
    """Declare how fast states fade, ``A_log``; return ``-exp`` of it, of a matrix the transposed one."""
    return numbers(scope, "A_log", shape, lambda tensor: -torch.exp(tensor).t())


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
    *,
    biased: bool,
    silu: bool,
    factors: torch.Tensor | None = None,
) -> CausalConv:
    """Declare a convolution; ``factors [channels]``: of its inputs, which it sees as they are otherwise."""
    old, channels = need.conv

    def by_tap(weight: torch.Tensor) -> torch.Tensor:
        taps = weight.squeeze(1).t()
        return taps if factors is None else taps * factors.to(taps.device)

    return CausalConv(
        state=conv_part(scope, need),
        weight=numbers(scope, f"{name}.weight", (channels, 1, old + 1), by_tap),
        bias=numbers(scope, f"{name}.bias", (channels,)) if biased else None,
        silu=silu,
    )
