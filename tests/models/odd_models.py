"""Models of no family: every combination of operations that the forward passes treat specially."""

from __future__ import annotations

import torch

from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.model_config.rope import RopeSpec
from quintet.executor.model_config.spec import Activation, NormKind
from quintet.executor.models.forward import AttentionLayer, ForwardPass, ValueT
from quintet.executor.models.layers.linear import Embedding, GatedActivation, Linear, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import Setting

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDE = 97, 64, 2, 4, 2, 16, 96
Q_WIDTH, KV_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
HF_CONFIG = {
    "architectures": ["Odd"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}


class OddModel:
    """A `quintet.executor.models.model.CausalModel` with layers of ``kind``; random weights, the same everywhere."""

    def __init__(self, kind: str, setting: Setting) -> None:
        self.vocab_size = VOCAB
        rope = RopeSpec(
            kind="default", theta=1e4, rotary_dim=HEAD_DIM, max_positions=256, original_positions=256
        )
        self.ropes = [Rope(rope, setting.device)]
        self.attentions: list[AttentionLayer] = []
        self.weights = WeightPlan(setting.dtype, setting.device)
        self._setting = setting
        self._embedding = Embedding(setting.quantization, self.weights, "embedding", VOCAB, HIDDEN)
        self._head = self._linear("head", VOCAB, HIDDEN, is_output_layer=True)
        self._last = self._norm("last")
        self._layers = [KINDS[kind](self, index) for index in range(LAYERS)]
        self._positions = self.weights.tensor("positions", 200, HIDDEN) if kind == "parallel" else None
        self.weights.reservation = reserve(self.weights.stores)
        for number, expected in enumerate(self.weights.expected.values()):
            random = torch.Generator().manual_seed(number)
            tensor = torch.randn(expected.shape, generator=random) * expected.shape[-1] ** -0.5
            if expected.scale == 0:  # of a norm
                tensor = tensor + 1
            for sink in (*expected.sinks, *expected.packers):
                sink(tensor.to(setting.dtype))

    def _linear(self, name: str, columns: int, depth: int, **switches: object) -> Linear:
        shape = LinearShape((RowRange(name, columns),), depth, **switches)  # type: ignore[arg-type]
        return Linear(self._setting.quantization, self.weights, shape)

    def _norm(
        self,
        name: str,
        width: int = HIDDEN,
        kind: NormKind = NormKind.RMS,
        weights: int | None = HIDDEN,
        biased: bool = False,
        offset: float = 0.0,
        rounds_once: bool = False,
    ) -> Norm:
        """weights: their number; None for none."""
        return Norm(
            kind=kind,
            width=width,
            eps=1e-5,
            weight=None if weights is None else self.weights.ones(f"{name}.weight", weights),
            bias=self.weights.tensor(f"{name}.bias", HIDDEN) if biased else None,
            offset=offset,
            rounds_once=rounds_once,
        )

    def _attention(
        self,
        index: int,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        wider: int = 1,
        norms_after_rope: bool = False,
    ) -> AttentionLayer:
        """wider: heads are this factor wider, and this factor fewer."""
        layer = AttentionLayer(
            index=index,
            num_heads=HEADS // wider,
            num_kv_heads=KV_HEADS // wider,
            head_dim=HEAD_DIM * wider,
            rope=0,
            rotary_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            q_norm=q_norm,
            k_norm=k_norm,
            norms_after_rope=norms_after_rope,
        )
        self.attentions.append(layer)
        return layer

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """As `CausalModel.forward`."""
        x = ops.scale(ops.embedding(self._embedding), 2.7)
        if self._positions is not None:
            x = ops.add_positions(x, self._positions, 2)
        first = x
        for layer in self._layers:
            x = layer.forward(ops, x, first)
        return x

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """As `CausalModel.logits`."""
        return ops.softcap(ops.scale(ops.linear(self._head, ops.norm(hidden, self._last)), 0.7), 5.0)


class _Layer:
    """The computation of a layer."""

    def __init__(self, model: OddModel, index: int) -> None:
        raise NotImplementedError

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        """first: the first layer's input."""
        raise NotImplementedError


class Parallel(_Layer):
    """Attention and feed-forward of one layer norm, with biases everywhere, and no gate."""

    def __init__(self, model: OddModel, index: int) -> None:
        self._norm = model._norm(f"{index}.norm", kind=NormKind.LAYER, biased=True)
        self._qkv = model._linear(f"{index}.qkv", Q_WIDTH + 2 * KV_WIDTH, HIDDEN, biased=True)
        self._attention = model._attention(index)
        self._output = model._linear(f"{index}.output", HIDDEN, Q_WIDTH, biased=True)
        self._up = model._linear(f"{index}.up", WIDE, HIDDEN, biased=True)
        self._down = model._linear(f"{index}.down", HIDDEN, WIDE, biased=True)
        self._kind = (Activation.GELU, Activation.RELU2)[index]

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        normed = ops.norm(x, self._norm)
        attended = ops.linear(
            self._output, fused_attention(ops, self._attention, ops.linear(self._qkv, normed))
        )
        wide = ops.activation(ops.linear(self._up, normed), self._kind)
        return ops.add(ops.add(x, attended), ops.linear(self._down, wide))


class Sandwich(_Layer):
    """Norms before and after, with an offset; gates of a kind that only some passes have kernels for."""

    def __init__(self, model: OddModel, index: int) -> None:
        self._norms = [model._norm(f"{index}.norm{i}", offset=1.0) for i in range(4)]
        self._qkv = model._linear(f"{index}.qkv", Q_WIDTH + 2 * KV_WIDTH, HIDDEN)
        heads = [model._norm(f"{index}.{part}", HEAD_DIM, weights=HEAD_DIM, offset=1.0) for part in "qk"]
        self._attention = model._attention(index, heads[0], heads[1])
        self._output = model._linear(f"{index}.output", HIDDEN, Q_WIDTH)
        kind = (GatedActivation.GELU_TANH_AND_MUL, GatedActivation.RELU_AND_MUL)[index]
        self._gate_up = model._linear(f"{index}.gate_up", 2 * WIDE, HIDDEN, activation=kind)
        self._down = model._linear(f"{index}.down", HIDDEN, WIDE)

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        qkv = ops.linear(self._qkv, ops.norm(x, self._norms[0]))
        attended = ops.linear(self._output, fused_attention(ops, self._attention, qkv))
        x = ops.add(x, ops.norm(attended, self._norms[1]))
        gated = ops.linear(self._gate_up, ops.norm(x, self._norms[2]))
        return ops.add(x, ops.norm(ops.linear(self._down, gated), self._norms[3]))


class NormsAfter(_Layer):
    """Norms of the sums; separate clipped layers for queries, keys and values; queries normed per head with own
    weights; and gates of the attention output, by number and by row.
    """

    def __init__(self, model: OddModel, index: int) -> None:
        self._norms = [model._norm(f"{index}.norm{i}", kind=NormKind.LAYER, weights=None) for i in range(2)]
        self._q = model._linear(f"{index}.q", Q_WIDTH, HIDDEN)
        self._k = model._linear(f"{index}.k", KV_WIDTH, HIDDEN)
        self._v = model._linear(f"{index}.v", KV_WIDTH, HIDDEN)
        heads = model._norm(f"{index}.heads", HEAD_DIM, NormKind.LAYER, weights=Q_WIDTH)
        self._attention = model._attention(index, q_norm=heads)
        self._gates = model._linear(f"{index}.gates", Q_WIDTH + 1, HIDDEN)
        self._output = model._linear(f"{index}.output", HIDDEN, Q_WIDTH)
        self._mix = model._linear(f"{index}.mix", HIDDEN, HIDDEN)

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        q, k, v = (ops.clip(ops.linear(layer, x), 0.9) for layer in (self._q, self._k, self._v))
        gates = ops.activation(ops.linear(self._gates, x), Activation.SIGMOID)
        attended = ops.multiply(ops.attention(self._attention, q, k, v), ops.columns(gates, 1, Q_WIDTH))
        attended = ops.scale(ops.multiply(attended, ops.columns(gates, 0, 1)), 9.0)
        x = ops.norm(ops.add(x, ops.linear(self._output, attended)), self._norms[0])
        return ops.norm(ops.linear(self._mix, x), self._norms[1])


class ReadLater(_Layer):
    """The first layer's input is added to every layer's. A layer's result is both added and multiplied. Norms follow
    the rotation; one norm rounds once; the activation has learned parameters.
    """

    def __init__(self, model: OddModel, index: int) -> None:
        self._norm = model._norm(f"{index}.norm", rounds_once=True)
        self._numbers = torch.tensor([0.8, 0.3, 0.5, -1e-6], device=model._setting.device)
        self._qkv = model._linear(f"{index}.qkv", Q_WIDTH + 2 * KV_WIDTH, HIDDEN)
        heads = [model._norm(f"{index}.{part}", HEAD_DIM, weights=HEAD_DIM) for part in "qk"]
        self._attention = model._attention(index, heads[0], heads[1], norms_after_rope=index == 1)
        self._output = model._linear(f"{index}.output", HIDDEN, Q_WIDTH)
        self._mix = model._linear(f"{index}.mix", HIDDEN, HIDDEN)

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        qkv = ops.linear(self._qkv, ops.norm(x, self._norm))
        attended = ops.linear(self._output, fused_attention(ops, self._attention, qkv))
        x = ops.add(ops.add(first, ops.linear(self._mix, attended)), attended)
        half = ops.xielu(ops.columns(x, 0, HIDDEN), self._numbers)
        return ops.add(ops.activation(half, Activation.SILU), ops.norm(ops.add(x, first), self._norm))


class Unlike(_Layer):
    """Every layer has other heads."""

    def __init__(self, model: OddModel, index: int) -> None:
        self._norm = model._norm(f"{index}.norm")
        self._qkv = model._linear(f"{index}.qkv", Q_WIDTH + 2 * KV_WIDTH, HIDDEN)
        self._attention = model._attention(index, wider=index + 1)
        self._output = model._linear(f"{index}.output", HIDDEN, Q_WIDTH)

    def forward(self, ops: ForwardPass[ValueT], x: ValueT, first: ValueT) -> ValueT:
        qkv = ops.linear(self._qkv, ops.norm(x, self._norm))
        attended = ops.scale(fused_attention(ops, self._attention, qkv), 9.0)
        return ops.add(x, ops.linear(self._output, attended))


KINDS: dict[str, type[_Layer]] = {
    "parallel": Parallel,
    "sandwich": Sandwich,
    "behind": NormsAfter,
    "read later": ReadLater,
    "unlike": Unlike,
}


def fused_attention(ops: ForwardPass[ValueT], layer: AttentionLayer, qkv: ValueT) -> ValueT:
    """Attend with fused queries, keys and values."""
    k = ops.columns(qkv, Q_WIDTH, KV_WIDTH)
    return ops.attention(
        layer, ops.columns(qkv, 0, Q_WIDTH), k, ops.columns(qkv, Q_WIDTH + KV_WIDTH, KV_WIDTH)
    )
