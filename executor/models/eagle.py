"""An EAGLE-3 draft head (Li et al., "EAGLE-3: scaling up inference acceleration of large language models", 2025).

    token ─ embedding ─ norm ─╮
                              ├─ join ─ attention ─ + ─ norm ─ feed-forward ─ + ─ hidden ─ norm ─ head ─ logits
    features ─┬─────── norm ──╯                     │                         │
              ╰─────────────────────────────────────┴─────────────────────────╯

The features of a token are of the token before it: hidden states of the served model, joined and multiplied by ``fc``, where it
has computed them; else the head's own hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch

from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.eagle import EagleSpec
from quintet.executor.model_config.spec import AttentionSpec
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.linear import Embedding, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import CausalModel, Setting
from quintet.executor.models.sublayers.attention import Attention
from quintet.executor.models.sublayers.layer import feed_forward
from quintet.executor.models.sublayers.scope import Scope

IGNORED = ("t2d", "verifier_norm.*", "verifier_lm_head.*")
"""Tensors that only training uses."""


class EagleHead:
    """A `quintet.executor.models.model.CausalModel` over token ids and features. A loader fills its ``weights``."""

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
        self._norm = _known(outside.norm(spec.final_norm, spec.names.final_norm))
        self._embedding: Embedding | None = None
        if spec.has_embedding:
            self._embedding = Embedding(
                setting.quantization, self.weights, spec.names.embedding, spec.vocab_size, hidden
            )
        self._token_norm = _known(inside.norm(norm, spec.names.mixer_norm))
        self._features_norm = _known(inside.norm(norm, "hidden_norm"))
        self._attention = Attention(inside, layer.mixer, depth=2 * hidden)
        self._mlp_norm = _known(inside.norm(layer.mlp_norms.before, spec.names.mlp_norm))
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
        self.token_map = torch.arange(self.vocab_size) + offsets.long()

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


def _known(norm: Norm | None) -> Norm:
    assert norm is not None, "every norm of a head has a spec"
    return norm


def observed_forward(
    model: CausalModel, ops: ForwardPass[ValueT], aux_layers: Collection[int], *, are_joined: bool = False
) -> tuple[ValueT, list[ValueT]]:
    """Return the last hidden states of a served model, and copies of those after each number of layers in ``aux_layers``.

    are_joined: return one copy, ``[tokens, layers * hidden]``.
    """
    observed: list[ValueT] = []

    def observe(number: int, x: ValueT) -> None:
        if number in aux_layers:
            observed.append(
                ops.scale(x, 1.0)
            )  # a kept x would be fused in another way, and so have other bits

    if not aux_layers:
        return model.forward(ops), observed
    assert isinstance(model, Decoder), "the configuration allows draft heads of decoders only"
    hidden = model.forward(ops, observe)
    return hidden, [functools.reduce(ops.join, observed)] if are_joined else observed
