"""The pre-norm decoder with rotary positions and a gated feed-forward: Llama and everything shaped like it.

One block, top to bottom::

    x ──┬─ norm ─ q,k,v ─ (q,k norm) ─ rope ─ attention over the cache ─ o ─┐
        └───────────────────────────────────────────────────────────────── + ──┬─ norm ─ gate,up ─ silu·mul ─ down ─┐
                                                                              └──────────────────────────────────── + ── x

Families differ in the numbers and switches of `DecoderSpec` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.executor.cards.spec import DecoderSpec, NormSpec
from quintet.executor.layers.linear import Embedding, GatedActivation, Linear, Part
from quintet.executor.layers.norm import Norm
from quintet.executor.layers.rope import Rope
from quintet.executor.models.forward import AttentionLayer, ForwardPass, ValueT
from quintet.executor.models.model import Setting
from quintet.executor.weights.plan import WeightPlan


@dataclass(frozen=True, slots=True)
class _Block:
    """Weights of one layer, with what is multiplied together stacked."""

    input_norm: Norm
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """A `quintet.executor.models.model.CausalModel`. Its layers are empty until a loader fills ``weights``."""

    def __init__(self, spec: DecoderSpec, setting: Setting) -> None:
        assert spec.final_norm is not None
        mixer = spec.layers[0].mixer
        self.vocab_size = spec.vocab_size
        self.num_heads = mixer.num_heads
        self.num_kv_heads = mixer.num_kv_heads
        self.head_dim = mixer.head_dim
        self.windows: Sequence[int | None] = [layer.mixer.window for layer in spec.layers]
        self.rope = Rope(spec.ropes[0], setting.device)
        names = spec.names
        self.weights = WeightPlan(
            setting.dtype,
            setting.device,
            prefix=names.prefix,
            ignored=(*names.ignored, f"{names.head}.weight"),
        )
        if spec.tied:  # a checkpoint may have the one, the other, or both
            self.weights.aliases[f"{names.embedding}.weight"] = f"{names.head}.weight"
        hidden = spec.hidden_size
        self._head = Linear(
            setting,
            self.weights,
            (Part(names.embedding if spec.tied else names.head, spec.vocab_size),),
            hidden,
            is_output_layer=True,
        )
        self._embedding = Embedding(
            self.weights, names.embedding, spec.vocab_size, hidden, self._head if spec.tied else None
        )
        self._blocks = [_block(setting, self.weights, spec, index) for index in range(len(spec.layers))]
        self._norm = _norm(self.weights, spec.final_norm, names.final_norm, hidden)

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`."""
        x = ops.embedding(self._embedding)  # [T, hidden]
        for block in self._blocks:
            x = ops.add(x, self._attention(ops, block, ops.norm(x, block.input_norm)))
            gated = ops.linear(block.gate_up, ops.norm(x, block.mlp_norm))
            x = ops.add(x, ops.linear(block.down, gated))
        return x

    def _attention(self, ops: ForwardPass[ValueT], block: _Block, x: ValueT) -> ValueT:
        qkv = ops.linear(block.qkv, x)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k = ops.columns(qkv, 0, queries), ops.columns(qkv, queries, keys)
        v = ops.columns(qkv, queries + keys, keys)
        return ops.linear(block.output, ops.attention(block.attention, q, k, v))

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`. The final norm is here: only rows that draw need it."""
        return ops.linear(self._head, ops.norm(hidden, self._norm))


def _norm(weights: WeightPlan, spec: NormSpec, name: str, width: int) -> Norm:
    return Norm(kind=spec.kind, width=width, eps=spec.eps, weight=weights.ones(f"{name}.weight", width))


def _block(setting: Setting, weights: WeightPlan, spec: DecoderSpec, index: int) -> _Block:
    """Declare the tensors of one layer."""
    layer, names, hidden = spec.layers[index], spec.names, spec.hidden_size
    mixer, mlp = layer.mixer, layer.mlp
    q_width, kv_width = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    assert (
        mixer.rope is not None and layer.mixer_norms.before is not None and layer.mlp_norms.before is not None
    )

    def part(name: str, rows: int) -> Part:
        return Part(names.in_layer(index, name), rows)

    def norm(spec: NormSpec, name: str, width: int) -> Norm:
        return _norm(weights, spec, names.in_layer(index, name), width)

    return _Block(
        input_norm=norm(layer.mixer_norms.before, names.mixer_norm, hidden),
        qkv=Linear(
            setting,
            weights,
            (part(names.q, q_width), part(names.k, kv_width), part(names.v, kv_width)),
            hidden,
            biased=mixer.qkv_bias,
        ),
        attention=AttentionLayer(
            index=index,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            rotary_dim=mixer.rope.rotary_dim,
            scale=mixer.scale,
            window=mixer.window,
            q_norm=norm(mixer.qk_norm, names.q_norm, mixer.head_dim) if mixer.qk_norm else None,
            k_norm=norm(mixer.qk_norm, names.k_norm, mixer.head_dim) if mixer.qk_norm else None,
        ),
        output=Linear(setting, weights, (part(names.output, hidden),), q_width, biased=mixer.output_bias),
        mlp_norm=norm(layer.mlp_norms.before, names.mlp_norm, hidden),
        gate_up=Linear(
            setting,
            weights,
            (part(names.gate, mlp.width), part(names.up, mlp.width)),
            hidden,
            biased=mlp.biased,
            activation=GatedActivation.SILU_AND_MUL,
        ),
        down=Linear(setting, weights, (part(names.down, hidden),), mlp.width, biased=mlp.biased),
    )
