"""Draft heads: EAGLE, layers for multi-token prediction, Medusa. A loader fills their ``weights``.

A head reads features: hidden states of the served model. Each layer of a head is a `quintet.executor.models.model.CausalModel`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.draft_heads import EagleSpec, MedusaSpec
from quintet.executor.model_config.mtp import MtpSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.spec import Activation, AttentionSpec
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import Embedding, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import CausalModel, Setting
from quintet.executor.models.sublayers.attention import Attention
from quintet.executor.models.sublayers.layer import Layer, feed_forward
from quintet.executor.models.sublayers.scope import Scope

IGNORED = ("t2d", "verifier_norm.*", "verifier_lm_head.*")
"""Tensors that only training uses."""


class EagleHead:
    """An EAGLE-3 draft head (Li et al., "EAGLE-3: scaling up inference acceleration of large language models", 2025).

        token ─ embedding ─ norm ─╮
                                  ├─ join ─ attention ─ + ─ norm ─ feed-forward ─ + ─ hidden ─ norm ─ head ─ logits
        features ─┬─────── norm ──╯                     │                         │
                  ╰─────────────────────────────────────┴─────────────────────────╯

    The features of a token are of the token before it: hidden states of the served model, joined and multiplied by ``fc``,
    where it has computed them; else the head's own hidden states.
    """

    def __init__(self, spec: EagleSpec, setting: Setting) -> None:
        self.spec, hidden = spec, spec.hidden_size
        self.weights = WeightPlan(setting.dtype, setting.device, prefix=spec.names.prefix, ignored=IGNORED)
        self.vocab_size = spec.draft_vocab_size
        outside = Scope(setting, self.weights, spec.names, hidden, ropes=spec.ropes)
        inside = outside.of_layer(0)
        (layer,) = spec.layers
        assert isinstance(layer.mixer, AttentionSpec) and layer.mlp is not None, layer
        norm = layer.mixer_norms.before
        self._head = outside.linear(
            [RowRange(spec.names.head, self.vocab_size)], hidden, is_output_layer=True
        )
        self._norm = _present(outside.norm(spec.final_norm, spec.names.final_norm))
        self._embedding: Embedding | None = None
        if spec.has_embedding:
            self._embedding = Embedding(
                setting.quantization, self.weights, spec.names.embedding, spec.vocab_size, hidden
            )
        self._token_norm = _present(inside.norm(norm, spec.names.mixer_norm))
        self._features_norm = _present(inside.norm(norm, "hidden_norm"))
        self._attention = Attention(inside, layer.mixer, depth=2 * hidden)
        self._mlp_norm = _present(inside.norm(layer.mlp_norms.before, spec.names.mlp_norm))
        self._mlp = feed_forward(inside, layer.mlp)
        joined = spec.target_hidden_size * max(1, len(spec.aux_layers))
        self._fc = outside.linear([RowRange("fc", hidden)], joined, is_exact=True)
        self._fc_norm = outside.norm(norm, "input_norm", joined) if spec.norm_before_fc else None
        self.token_map: torch.Tensor | None = None
        """int64 ``[draft_vocab_size]``: served model's ids of the head's tokens; None if they are the same."""
        if spec.has_token_map:
            self.weights.expect("d2t", (self.vocab_size,), self._keep_token_map)
            self.weights.as_codes("d2t", ("I64", "I32"), (0, 0))
        self.attentions = outside.attentions
        self.ropes = [Rope(rope, setting.device) for rope in spec.ropes]

    def _keep_token_map(self, offsets: torch.Tensor) -> None:
        """Keep the ids. offsets: id of the served model minus id of the head, for each token of the head."""
        self.token_map = torch.arange(self.vocab_size) + offsets.cpu().long()

    @property
    def layers(self) -> Sequence[CausalModel]:
        """The only layer."""
        return [self]

    def share(self, served: Decoder) -> None:
        """Use the served model's embedding, unless the head has its own."""
        self._embedding = self._embedding or served.embedding

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features ``[tokens, hidden]`` of the served model's joined hidden states."""
        norm = self._fc_norm
        if norm is not None:
            hidden = torch.nn.functional.rms_norm(hidden, hidden.shape[1:], norm.weight, norm.eps)
        return self._fc(hidden)

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`."""
        assert self._embedding is not None, "an embedding is set before the pass"
        token = ops.norm(ops.embedding(self._embedding), self._token_norm)
        features = ops.from_previous_stage(self.spec.hidden_size)
        normed = ops.norm(features, self._features_norm)
        residual = normed if self.spec.norm_before_residual else features
        x = ops.add(residual, self._attention(ops, ops.join(token, normed)))
        return ops.add(x, self._mlp(ops, ops.norm(x, self._mlp_norm)))

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`: over the head's tokens."""
        return ops.linear(self._head, ops.norm(hidden, self._norm))


def _present(norm: Norm | None) -> Norm:
    assert norm is not None, "every norm of a head has a spec"
    return norm


class MtpHead:
    """Multi-token prediction layers of a checkpoint, as a draft head. An EAGLE head is such a layer without the norms below.

        token ─ embedding ─ norm ─╮
                                  ├─ join ─ projection ─ layer ─ norm ─ hidden ─ output layer ─ logits
        features ────────── norm ─╯

    The features of a token are of the token before it: the served model's hidden states after its last norm, where it has
    computed them; else the head's own hidden states. Of several layers, each reads those of the one before, and proposes one more
    token. Embedding and output layer are the served model's, with its factors of logits.
    """

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
        return _after_last_norm(self._served, hidden)


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


def _after_last_norm(served: Decoder | None, hidden: torch.Tensor) -> torch.Tensor:
    norm = _known(served).final_norm
    return hidden if norm is None else norm(hidden)


def _known(served: Decoder | None) -> Decoder:
    assert served is not None, "the served model is set before the pass"
    return served


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
    """Medusa heads (Cai et al., "Medusa", 2024): each proposes one later token from the same features.

        features ─ x + SiLU(linear x) ─ … ─ output layer ─ logits

    Features are the served model's hidden states after its last norm. A head has neither keys and values nor an embedding.
    """

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
        return _after_last_norm(self._served, hidden)


def observed_forward(
    model: CausalModel, ops: ForwardPass[ValueT], aux_layers: Collection[int], *, are_joined: bool = False
) -> tuple[ValueT, list[ValueT]]:
    """Return the last hidden states of a served model, and copies of those after each number of layers in ``aux_layers``.

    are_joined: return one copy, ``[tokens, layers * hidden]``.
    """
    observed: list[ValueT] = []

    def observe(number: int, x: ValueT) -> None:
        if number in aux_layers:
            # A copy: a kept x would be fused in another way, and so have other bits.
            observed.append(ops.scale(x, 1.0))

    if not aux_layers:
        return model.forward(ops), observed
    assert isinstance(model, Decoder), "the configuration allows draft heads of decoders only"
    hidden = model.forward(ops, observe)
    return hidden, [functools.reduce(ops.join, observed)] if are_joined else observed
