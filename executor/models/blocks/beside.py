"""Attention and a Mamba 2 scan in parallel (Falcon-H1): the sum of both outputs."""

from __future__ import annotations

from quintet.executor.model_config.spec import ParallelMixerSpec
from quintet.executor.models.blocks.attention import Attention
from quintet.executor.models.blocks.mamba2 import Mamba2, scaled
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.forward import ForwardPass, ValueT


class ParallelMixer:
    """A `quintet.executor.models.blocks.block.Block`."""

    def __init__(self, scope: Scope, spec: ParallelMixerSpec) -> None:
        self._spec = spec
        self._state = Mamba2(scope, spec.state)
        self._attention = Attention(scope, spec.attention)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Block`."""
        (state_in, state_out), (attention_in, attention_out) = (
            self._spec.state_factors,
            self._spec.attention_factors,
        )
        scanned = scaled(ops, self._state(ops, scaled(ops, x, state_in)), state_out)
        attended = scaled(ops, self._attention(ops, scaled(ops, x, attention_in)), attention_out)
        return ops.add(scanned, attended)
