"""Gated short convolution (LFM2): ``out(c * conv(b * x))``, with one projection for all three."""

from __future__ import annotations

from quintet.executor.model_config.state_specs import ShortConvSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.models.sublayers.states import KeptRows, convolution, output


class ShortConv:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

    def __init__(self, scope: Scope, spec: ShortConvSpec) -> None:
        channels = scope.share.of(spec.channels)
        self._channels = channels.count
        self._in = scope.linear(
            KeptRows(*3 * [channels]).parts(scope, "in_proj"), scope.hidden_size, biased=spec.biased
        )
        need = scope.share.of_state(spec).state_need
        self._conv = convolution(scope, need, "conv", KeptRows(channels), biased=spec.biased, silu=False)
        self._out = output(scope, "out_proj", channels, scope.hidden_size, biased=spec.biased)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        width = self._channels
        projected = ops.linear(self._in, x)
        b, c, x = (ops.columns(projected, i * width, width) for i in range(3))
        return ops.linear(self._out, ops.multiply(c, ops.causal_conv(self._conv, ops.multiply(b, x))))
