"""A multi-token prediction layer of a checkpoint, as a draft head.

    token ─ embedding ─ norm ─╮
                              ├─ join ─ projection ─ layer ─ norm ─ hidden ─ output layer ─ logits
    features ────────── norm ─╯

The features of a token are of the token before it: the served model's hidden states after its last norm, where it has
computed them; else the head's own hidden states. Embedding and output layer are the served model's.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.mtp import MtpSpec
from quintet.executor.models.blocks.layer import Layer
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting

PartT = TypeVar("PartT")


class MtpHead:
    """A `quintet.executor.models.model.CausalModel` over token ids and features. A loader fills its ``weights``."""

    token_map = None

    def __init__(self, spec: MtpSpec, setting: Setting) -> None:
        names, parts, hidden = spec.names, spec.parts, spec.hidden_size
        self.spec, self.vocab_size = spec, spec.vocab_size
        self.weights = WeightPlan(setting.dtype, setting.device, prefix=names.prefix, ignored=("*",))
        attentions: list[AttentionLayer] = []
        outside = Scope(setting, self.weights, names, hidden)
        inside = Scope(
            *(setting, self.weights, names, hidden, 0, spec.transposed, spec.ropes), attentions=attentions
        )
        self._token_norm = outside.norm(spec.final_norm, parts.token_norm)
        self._features_norm = outside.norm(spec.final_norm, parts.hidden_norm)
        self._projection = outside.linear([outside.part(parts.projection, hidden)], 2 * hidden)
        (layer,) = spec.layers
        self._layer = Layer(inside, layer)
        self._output_norm: Norm | None = None
        if parts.output_norm is not None:
            self._output_norm = outside.norm(spec.final_norm, parts.output_norm)
        self._served: Decoder | None = None
        self.attentions = attentions
        self.ropes = [Rope(rope, setting.device) for rope in spec.ropes]

    def share(self, served: Decoder) -> None:
        """Use the served model's embedding, last norm and output layer."""
        self._served = served

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features ``[tokens, hidden]`` of the served model's hidden states after its last layer."""
        return _known(_known(self._served).final_norm)(hidden)

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`. The result is normed, as features are."""
        served = _known(self._served)
        token = ops.norm(ops.embedding(served.embedding), _known(self._token_norm))
        features = ops.norm(ops.from_previous_stage(self.spec.hidden_size), _known(self._features_norm))
        pair = (features, token) if self.spec.parts.hidden_first else (token, features)
        x = self._layer(ops, ops.linear(self._projection, ops.join(*pair)))
        return ops.norm(x, self._output_norm or _known(served.final_norm))

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`."""
        return ops.linear(_known(self._served).output_layer, hidden)


def _known(part: PartT | None) -> PartT:
    assert part is not None, "all families have norms, and the served model is set before the pass"
    return part
