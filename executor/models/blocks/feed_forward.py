"""Feed-forwards: ``down(activation(gate x) * up x)`` (Shazeer, "GLU variants improve transformer", 2020), or without a gate."""

from __future__ import annotations

from quintet.executor.cards.spec import Activation, MlpLayout, MlpSpec
from quintet.executor.layers.linear import GatedActivation
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.forward import ForwardPass, ValueT

_TOGETHER = {
    Activation.SILU: GatedActivation.SILU_AND_MUL,
    Activation.GELU_TANH: GatedActivation.GELU_TANH_AND_MUL,
}
"""Gated activations that a linear layer computes with its product."""


class FeedForward:
    """A `quintet.executor.models.blocks.block.Block`."""

    def __init__(self, scope: Scope, spec: MlpSpec) -> None:
        names, wide = scope.names, spec.width
        if spec.layout is MlpLayout.STACKED:
            parts = [scope.part(names.gate_up, wide, 2 * wide, begin) for begin in (0, wide)]
        else:
            parts = [scope.part(names.gate, wide), scope.part(names.up, wide)]
        self._up = scope.linear(
            parts, scope.hidden_size, biased=spec.biased, activation=_TOGETHER[spec.activation]
        )
        self._down = scope.linear([scope.part(names.down, scope.hidden_size)], wide, biased=spec.biased)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Block`."""
        return ops.linear(self._down, ops.linear(self._up, x))
