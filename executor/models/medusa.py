"""Medusa heads (Cai et al., "Medusa", 2024): each proposes one later token from the same features.

    features ─ x + SiLU(linear x) ─ … ─ output layer ─ logits

Features are the served model's hidden states after its last norm. A head has neither keys and values nor an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.medusa import MedusaSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.spec import Activation
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting
from quintet.executor.models.sublayers.scope import Scope


class MedusaHead:
    """A `quintet.executor.models.model.CausalModel` over features."""

    attentions: Sequence[AttentionLayer] = ()
    ropes: Sequence[Rope] = ()

    def __init__(self, spec: MedusaSpec, scope: Scope, index: int) -> None:
        self.weights, self.vocab_size, self._hidden_size = scope.weights, spec.vocab_size, spec.hidden_size
        self._layers = [
            scope.linear(
                [scope.part(spec.names.of_layer(index, layer), spec.hidden_size)],
                spec.hidden_size,
                biased=spec.biased,
            )
            for layer in range(spec.num_layers)
        ]
        self._output = scope.linear(
            [scope.part(spec.names.of_output(index, spec.num_layers), spec.vocab_size)],
            spec.hidden_size,
            is_output_layer=True,
        )

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`."""
        x = ops.from_previous_stage(self._hidden_size)
        for layer in self._layers:
            x = ops.add(x, ops.activation(ops.linear(layer, x), Activation.SILU))
        return x

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`."""
        return ops.linear(self._output, hidden)


class MedusaHeads:
    """All heads of a checkpoint. A loader fills their ``weights``."""

    attentions: Sequence[AttentionLayer] = ()

    def __init__(self, spec: MedusaSpec, setting: Setting) -> None:
        self.vocab_size = spec.vocab_size
        self.weights = WeightPlan(setting.dtype, setting.device, prefix=spec.prefix, ignored=("*",))
        scope = Scope(setting, self.weights, Names(), spec.hidden_size)
        self.heads = [MedusaHead(spec, scope, index) for index in range(spec.num_heads)]
        self._served: Decoder | None = None

    def share(self, served: Decoder) -> None:
        """Use the served model's last norm."""
        self._served = served

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features ``[tokens, hidden]`` of the served model's hidden states after its last layer."""
        assert self._served is not None, "the served model is set before the first step"
        norm = self._served.final_norm
        return hidden if norm is None else norm(hidden)
