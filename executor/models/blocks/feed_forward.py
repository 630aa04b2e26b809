"""Feed-forwards: ``down(activation(gate x) * up x)`` (Shazeer, "GLU variants improve transformer", 2020), or without a gate."""

from __future__ import annotations

from quintet.executor.cards.spec import MlpLayout, MlpSpec
from quintet.executor.layers.linear import GatedActivation
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.forward import ForwardPass, ValueT


class FeedForward:
    """A `quintet.executor.models.blocks.block.Block`."""

    def __init__(self, scope: Scope, spec: MlpSpec) -> None:
        names, wide = scope.names, spec.width
        if not spec.gated:
            parts = [scope.part(names.up, wide)]
        elif spec.layout is MlpLayout.STACKED:
            parts = [scope.part(names.gate_up, wide, 2 * wide, begin) for begin in (0, wide)]
        else:
            parts = [scope.part(names.gate, wide), scope.part(names.up, wide)]
        gates = GatedActivation.of(spec.activation) if spec.gated else GatedActivation.NONE
        self._up = scope.linear(parts, scope.hidden_size, biased=spec.biased, activation=gates)
        self._activation = None if spec.gated else spec.activation
        self._down = scope.linear([scope.part(names.down, scope.hidden_size)], wide, biased=spec.biased)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Block`."""
        up = ops.linear(self._up, x)
        if self._activation is not None:
            up = ops.activation(up, self._activation)
        return ops.linear(self._down, up)
