"""A multi-token prediction layer of a checkpoint, as a draft head. An EAGLE head is such a layer without the norms below.

    token ─ embedding ─ norm ─╮
                              ├─ join ─ projection ─ layer ─ norm ─ hidden ─ output layer ─ logits
    features ────────── norm ─╯

The features of a token are of the token before it: the served model's hidden states after its last norm, where it has
computed them; else the head's own hidden states. Embedding and output layer are the served model's, with its factors of logits.
"""

from __future__ import annotations

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.mtp import MtpSpec
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting
from quintet.executor.models.sublayers.layer import Layer
from quintet.executor.models.sublayers.scope import Scope


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
        self._token_norm, self._features_norm, self._output_norm = (
            None if name is None else outside.norm(spec.final_norm, name)
            for name in (parts.token_norm, parts.hidden_norm, parts.output_norm)
        )
        self._projection = outside.linear(
            [outside.part(parts.projection, hidden)], 2 * hidden, biased=spec.projection_bias
        )
        (layer,) = spec.layers
        self._layer = Layer(inside, layer)
        self._served: Decoder | None = None
        self._output: Decoder | None = None
        self.attentions = attentions
        self.ropes = [Rope(rope, setting.device) for rope in spec.ropes]

    def share(self, served: Decoder) -> None:
        """Use the served model's embedding and last norm."""
        self._served = served
        if self.spec.parts.has_output_norm:
            self._output_norm = self._output_norm or served.final_norm

    def share_output(self, served: Decoder) -> None:
        """Use the output layer of the served model, which is whole."""
        self._output = served

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features ``[tokens, hidden]`` of the served model's hidden states after its last layer."""
        norm = _known(self._served).final_norm
        return hidden if norm is None else norm(hidden)

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`. The result is in place of features."""
        token = _normed(ops, ops.embedding(_known(self._served).embedding), self._token_norm)
        features = _normed(ops, ops.from_previous_stage(self.spec.hidden_size), self._features_norm)
        pair = (features, token) if self.spec.parts.hidden_first else (token, features)
        x = self._layer(ops, ops.linear(self._projection, ops.join(*pair)))
        return _normed(ops, x, self._output_norm)

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`."""
        return _known(self._output).logits_of_normed(ops, hidden)


def _normed(ops: ForwardPass[ValueT], x: ValueT, norm: Norm | None) -> ValueT:
    return x if norm is None else ops.norm(x, norm)


def _known(served: Decoder | None) -> Decoder:
    assert served is not None, "the served model is set before the pass"
    return served
