"""Multi-token prediction layers of a checkpoint, as a draft head. An EAGLE head is such a layer without the norms below.

    token ─ embedding ─ norm ─╮
                              ├─ join ─ projection ─ layer ─ norm ─ hidden ─ output layer ─ logits
    features ────────── norm ─╯

The features of a token are of the token before it: the served model's hidden states after its last norm, where it has
computed them; else the head's own hidden states. Of several layers, each reads those of the one before, and proposes one more
token. Embedding and output layer are the served model's, with its factors of logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.mtp import MtpSpec
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting
from quintet.executor.models.sublayers.layer import Layer
from quintet.executor.models.sublayers.scope import Scope


class MtpHead:
    """Prediction layers of a checkpoint. A loader fills their ``weights``."""

    token_map = None

    def __init__(self, spec: MtpSpec, setting: Setting) -> None:
        self.vocab_size = spec.vocab_size
        self.weights = WeightPlan(setting.dtype, setting.device, prefix=spec.names.prefix, ignored=("*",))
        self.layers = [MtpLayer(spec, setting, self.weights, index) for index in range(len(spec.layers))]
        self.attentions = [attention for layer in self.layers for attention in layer.attentions]
        self._served: Decoder | None = None

    def share(self, served: Decoder) -> None:
        """Use the served model's embedding and last norm."""
        self._served = served
        for layer in self.layers:
            layer.share(served)

    def share_output(self, served: Decoder) -> None:
        """Use the output layer of the served model, which is whole."""
        for layer in self.layers:
            layer.output = served

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features ``[tokens, hidden]`` of the served model's hidden states after its last layer."""
        norm = _known(self._served).final_norm
        return hidden if norm is None else norm(hidden)


class MtpLayer:
    """A `quintet.executor.models.model.CausalModel` over token ids and features."""

    def __init__(self, spec: MtpSpec, setting: Setting, weights: WeightPlan, index: int) -> None:
        parts, hidden = spec.parts[index], spec.hidden_size
        names = replace(spec.names, layer=parts.layer)
        self.weights = weights
        self.vocab_size = spec.vocab_size
        self._parts = parts
        self._hidden_size = hidden
        outside = Scope(setting, weights, names, hidden, spec.transposed, spec.ropes)
        self._token_norm, self._features_norm, self._output_norm = (
            None if name is None else outside.norm(spec.final_norm, name)
            for name in (parts.token_norm, parts.hidden_norm, parts.output_norm)
        )
        self._projection = outside.linear(
            [outside.part(parts.projection, hidden)], 2 * hidden, biased=spec.projection_bias
        )
        self._layer = Layer(outside.of_layer(index), spec.layers[index])
        self._served: Decoder | None = None
        self.output: Decoder | None = None
        """The served model with a whole output layer."""
        self.attentions = outside.attentions
        self.ropes = [Rope(rope, setting.device) for rope in spec.ropes]

    def share(self, served: Decoder) -> None:
        """Use the served model's embedding and last norm."""
        self._served = served
        if self._parts.has_output_norm:
            self._output_norm = self._output_norm or served.final_norm

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`. The result is in place of features."""
        token = _normed(ops, ops.embedding(_known(self._served).embedding), self._token_norm)
        features = _normed(ops, ops.from_previous_stage(self._hidden_size), self._features_norm)
        pair = (features, token) if self._parts.hidden_first else (token, features)
        x = self._layer(ops, ops.linear(self._projection, ops.join(*pair)))
        return _normed(ops, x, self._output_norm)

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`."""
        return _known(self.output).logits_of_normed(ops, hidden)


def _normed(ops: ForwardPass[ValueT], x: ValueT, norm: Norm | None) -> ValueT:
    return x if norm is None else ops.norm(x, norm)


def _known(served: Decoder | None) -> Decoder:
    assert served is not None, "the served model is set before the pass"
    return served
