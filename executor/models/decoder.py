"""The decoder: embedding, layers, final norm, output layer. It implements every model with a `DecoderSpec`.

    tokens ─ embedding ─ (in) ─ (+ positions) ─ (norm) ─ layer ─ … ─ layer ─ norm ─ (out) ─ head ─ logits

`quintet.executor.models.sublayers` has the parts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.share import Share
from quintet.executor.model_config.spec import DecoderSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import Embedding, Linear, RowRange
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting
from quintet.executor.models.sublayers.layer import Layer
from quintet.executor.models.sublayers.scope import Scope


class Decoder:
    """A `quintet.executor.models.model.CausalModel`. A loader fills its ``weights``."""

    def __init__(self, spec: DecoderSpec, setting: Setting) -> None:
        names = spec.names
        self.weights = WeightPlan(
            setting.dtype,
            setting.device,
            prefix=names.prefix,
            ignored=(*names.ignored, f"{names.head}.weight"),
        )
        if spec.tied:  # a checkpoint may have either or both
            self.weights.aliases[f"{names.embedding}.weight"] = f"{names.head}.weight"
        self.vocab_size = spec.vocab_size
        scope = Scope(setting, self.weights, names, spec.hidden_size, spec.transposed, spec.ropes)
        self._hidden_size = spec.hidden_size
        self._is_first, self._is_last = setting.share.is_first, setting.share.is_last
        self._first_layer = 0 if setting.share.layers is None else setting.share.layers[0]
        if self._is_last:
            self._declare_output(scope, spec)
        if self._is_first:
            self._declare_input(scope, spec)
        if self._is_first or self._is_last:
            self.final_norm = scope.norm(spec.final_norm, names.final_norm)
            """The norm before the output layer; draft heads in the first stage use it, too."""
        if setting.share.stages > 1:
            self.weights.on_other_ranks.update(_other_stages_prefixes(names, setting.share, len(spec.layers)))
        self._layers = [
            Layer(scope.of_layer(index), layer)
            for index, layer in enumerate(spec.layers)
            if setting.share.has_layer(index)
        ]
        self.attentions: Sequence[AttentionLayer] = scope.attentions
        self.ropes = [Rope(rope, setting.device) for rope in spec.ropes]

    def _declare_output(self, scope: Scope, spec: DecoderSpec) -> None:
        """Declare the parts after the layers."""
        names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width or spec.hidden_size
        head = RowRange(
            names.embedding if spec.tied else names.head, spec.vocab_size, unit_rows=spec.normalised_head
        )
        head = head.keeping(scope.share.of(spec.vocab_size))
        self._head = scope.linear([head], width, biased=spec.head_bias, is_output_layer=True)
        self._project_out: Linear | None = None
        if spec.embedding_width is not None:
            # Adapters are applied to all tokens of a step, but this layer has only the rows of logits.
            shape = LinearShape((scope.part(names.project_out, width),), hidden)
            self._project_out = Linear(scope.setting.quantization, self.weights, shape)
        self._logit_scale, self._logit_softcap = spec.logit_scale, spec.logit_softcap

    def _declare_input(self, scope: Scope, spec: DecoderSpec) -> None:
        """Declare the parts before the layers."""
        names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width or spec.hidden_size
        is_shared = spec.tied and not spec.normalised_head and scope.share.is_all and self._is_last
        shared = self._head if is_shared else None
        self.embedding = Embedding(
            scope.setting.quantization, self.weights, names.embedding, spec.vocab_size, width, shared
        )
        self._project_in: Linear | None = None
        if spec.embedding_width is not None:
            self._project_in = scope.linear([scope.part(names.project_in, hidden)], width)
        # Rounded to the weights' dtype, as in models that store the factor as a weight.
        self._scale = float(torch.tensor(spec.embedding_scale, dtype=self.weights.dtype))
        self._offset, self._positions = 0, None
        if spec.positions is not None:
            self._offset = spec.positions.offset
            rows = spec.positions.count + spec.positions.offset
            self._positions = (
                sinusoids(rows, hidden).to(self.weights.device, self.weights.dtype)
                if spec.positions.sinusoidal
                else self.weights.tensor(f"{names.positions}.weight", rows, hidden)
            )
        self._embedding_norm = scope.norm(spec.embedding_norm, names.embedding_norm)

    def forward(
        self, ops: ForwardPass[ValueT], observe: Callable[[int, ValueT], None] | None = None
    ) -> ValueT:
        """See `CausalModel.forward`. observe: receives the hidden states after each number of layers, from 0."""
        x = self._begin(ops) if self._is_first else ops.from_previous_stage(self._hidden_size)
        for number, layer in enumerate(self._layers, self._first_layer):
            if observe is not None:
                observe(number, x)
            x = layer(ops, x)
        if observe is not None and self._is_last:
            observe(self._first_layer + len(self._layers), x)
        return x

    def _begin(self, ops: ForwardPass[ValueT]) -> ValueT:
        """Return the first layer's input."""
        x = ops.embedding(self.embedding)  # [T, embedding width]
        if self._scale != 1.0:
            x = ops.scale(x, self._scale)
        if self._project_in is not None:
            x = ops.linear(self._project_in, x)
        if self._positions is not None:
            x = ops.add_positions(x, self._positions, self._offset)
        if self._embedding_norm is not None:
            x = ops.norm(x, self._embedding_norm)
        return x

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`. The final norm covers sampling rows only. A rank returns its columns."""
        return self.logits_of_normed(ops, self.normed(ops, hidden))

    def normed(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `quintet.executor.models.model.PooledModel`."""
        return hidden if self.final_norm is None else ops.norm(hidden, self.final_norm)

    def logits_of_normed(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return the logits of hidden states after the final norm."""
        if self._project_out is not None:
            x = ops.linear(self._project_out, x)
        logits = ops.linear(self._head, x)
        if self._logit_scale != 1.0:
            logits = ops.scale(logits, self._logit_scale)
        return logits if self._logit_softcap is None else ops.softcap(logits, self._logit_softcap)


def _other_stages_prefixes(names: Names, share: Share, num_layers: int) -> set[str]:
    """Return name prefixes of tensors that other stages have. First and last stage both load a tied embedding."""
    before = (names.embedding, names.positions, names.embedding_norm, names.project_in)
    after = (names.head, names.project_out)
    norm = () if share.is_first or share.is_last else (names.final_norm,)
    found = {names.layer.format(layer=index) for index in range(num_layers) if not share.has_layer(index)}
    return found.union(norm, () if share.is_first else before, () if share.is_last else after)


def sinusoids(rows: int, width: int) -> torch.Tensor:
    """Return fp32 ``[rows, width]``; see `quintet.executor.model_config.spec.PositionTable.sinusoidal`."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * (-math.log(10000) / (half - 1)))
    angles = torch.arange(rows).float()[:, None] * frequencies
    return torch.nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, width % 2))
