"""A short convolution between two gates, as LFM2 mixes tokens: ``out(c * conv(b * x))``, all three projected at once."""

from __future__ import annotations

from quintet.executor.cards.state_specs import ShortConvSpec
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.blocks.states import below, convolution
from quintet.executor.models.forward import ForwardPass, ValueT


class ShortConv:
    """A `quintet.executor.models.blocks.block.Block`."""

    def __init__(self, scope: Scope, spec: ShortConvSpec) -> None:
        self._channels = spec.channels
        self._in = scope.linear(
            [scope.part(below(scope, "in_proj"), 3 * spec.channels)], scope.hidden_size, biased=spec.biased
        )
        self._conv = convolution(scope, spec.state_need, "conv", biased=spec.biased, silu=False)
        self._out = scope.linear(
            [scope.part(below(scope, "out_proj"), scope.hidden_size)], spec.channels, biased=spec.biased
        )

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Block`."""
        width = self._channels
        projected = ops.linear(self._in, x)
        b, c, x = (ops.columns(projected, i * width, width) for i in range(3))
        return ops.linear(self._out, ops.multiply(c, ops.causal_conv(self._conv, ops.multiply(b, x))))
