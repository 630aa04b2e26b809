"""What tells one model from another, as values: read from a card, followed by whoever builds the model.

A `DecoderSpec` is a tuple of layers; a layer is a mixer (attention, …) and a feed-forward, with norms around them. Imports no
torch: see `quintet.executor.models.decoder` for what is made of it, `quintet.executor.model_config.registry` for who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.kv_need import KvNeed
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormKind, Norms, NormSpec
from quintet.executor.model_config.rope import RopeSpec
from quintet.executor.model_config.state_specs import (
    DeltaSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateNeed,
)

__all__ = ["KvNeed", "NormKind", "NormSpec", "Norms"]  # of what is imported, for others to import from here


class ModelSpec(Protocol):
    """As much of a model as has to be known before it is built."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def kv_needs(self) -> tuple[KvNeed | None, ...]:
        """What each layer keeps of every token."""

    @property
    def state_needs(self) -> tuple[StateNeed | None, ...]:
        """What each layer keeps of every request besides; empty where no layer does."""

    @property
    def reach(self) -> int:
        """The longest context that the position encoding tells positions apart in."""

    @property
    def fixed_rope_len(self) -> int | None:
        """See `quintet.executor.model_config.rope.RopeSpec.fixed_len`: the least of all layers."""

    @property
    def num_parameters(self) -> int | None:
        """Numbers of all matrices: what the memory for weights is made of. None where only the executor knows."""


class Activation(StrEnum):
    """A nonlinearity: of a feed-forward, of a gate."""

    SILU = "silu"
    GELU = "gelu"
    """By the error function."""
    GELU_TANH = "gelu_tanh"
    """By its approximation with a hyperbolic tangent."""
    RELU = "relu"
    RELU2 = "relu2"
    """Squared."""
    QUICK_GELU = "quick_gelu"
    """``x * sigmoid(1.702 x)``."""
    SIGMOID = "sigmoid"


class LearnedActivation(StrEnum):
    """A nonlinearity whose shape a checkpoint has."""

    XIELU = "xielu"
    """See `quintet.executor.backends.cpu.ops.activation.xielu`: `Names.activation`."""


class QkvLayout(StrEnum):
    """How a checkpoint holds the weights of queries, keys and values."""

    SEPARATE = "separate"
    """A tensor each: `Names.q`, `Names.k`, `Names.v`."""
    STACKED = "stacked"
    """`Names.qkv`: all queries, then all keys, then all values."""
    GROUPED = "grouped"
    """`Names.qkv`: of each KV head its queries, its key, its value."""
    QUARTERS = "quarters"
    """`Names.qkv`: of each quarter of the heads, of which none share keys, the queries, the values, the keys."""


class QkNormOver(StrEnum):
    """What of a token's queries, or keys, is normed together."""

    HEAD = "head"
    """Each head by itself, all with one weight."""
    OWN = "own"
    """Each head by itself and with a weight of its own: a tensor ``[heads, head_dim]``, or one a head where the name has
    ``{head}``."""
    WHOLE = "whole"
    """All heads as one."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries of far positions are scaled up, times ``1 + growth * log(1 + (position + shift) / period)`` where that is more than
    1. Of periods only whole ones count (Llama 4), or parts too (Qwen 1)."""

    growth: float
    period: int
    shift: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a query, and of a key."""
    value_dim: int
    scale: float
    """Factor of every score."""
    rope: RopeSpec | None
    """How positions rotate queries and keys; None: they do not."""
    interleaved: bool = False
    """Whether neighbours (2i, 2i + 1) are rotated together, rather than i and i + half."""
    alibi: tuple[float, ...] = ()
    """Each head's slope: added to a score is slope times (key's position minus query's). Empty: nothing is added."""
    window: int | None = None
    """How many of the newest tokens a token sees, itself included; None for all."""
    chunk: int | None = None
    """Tokens see no earlier ones than their own chunk of so many positions; None for all."""
    causal: bool = True
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: bool = False
    """Whether each head has a logit of its own, `Names.sinks`, that takes a share of the softmax."""
    qk_norm: NormSpec | None = None
    """Of queries and keys before rotation, `Names.q_norm` and `Names.k_norm`."""
    qk_norm_over: QkNormOver = QkNormOver.HEAD
    qk_norm_behind: bool = False
    """Whether it is behind rotation instead; over heads."""
    temperature: Temperature | None = None
    """Of queries, after their rotation."""
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to this magnitude."""
    output_gate: bool = False
    """Whether `Names.q` has, behind each head's queries, as many gates: what is attended is multiplied with their sigmoid."""
    layout: QkvLayout = QkvLayout.SEPARATE
    attended_norm: NormSpec | None = None
    """Of what is attended, all heads as one, before `Names.output`: `Names.attended_norm`."""

    @property
    def kv_need(self) -> KvNeed:
        """What KV memory it takes."""
        return KvNeed(self.num_kv_heads, self.head_dim, self.value_dim, self.window, self.chunk)

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        keys = self.head_dim * (self.num_heads * (2 if self.output_gate else 1) + self.num_kv_heads)
        return hidden_size * (keys + self.value_dim * (self.num_heads + self.num_kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention over latents: a token's keys and values of all heads are made of one vector, which is what is kept, beside a
    rotated key that all heads share (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

    num_heads: int
    plain_dim: int
    """Numbers of a head's query that are not rotated."""
    rope_dim: int
    """Numbers that are."""
    head_width: int
    """Numbers of a head's result."""
    rank: int
    """Numbers of the latent: `Names.kv_a` makes it, `Names.kv_b` keys and values of it."""
    q_rank: int | None
    """Of that of queries: `Names.q_a`, `Names.q_b`; None: `Names.q` makes queries at once."""
    scale: float
    """Factor of every score."""
    rope: RopeSpec
    interleaved: bool
    """See `AttentionSpec`."""
    norm: NormSpec
    """Of latents: `Names.kv_a_norm`, `Names.q_a_norm`."""
    biased: bool = False
    """Whether what makes latents, and `Names.output`, have biases."""
    window: None = None

    @property
    def num_kv_heads(self) -> int:
        """Of what is kept: one, for all heads."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of a key that is kept, and of the queries that it meets."""
        return self.rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a value that is kept: the latent."""
        return self.rank

    @property
    def kv_need(self) -> KvNeed:
        """What KV memory it takes."""
        return KvNeed(1, self.head_dim, self.rank, values_in_keys=True)

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        queries = self.num_heads * (self.plain_dim + self.rope_dim)
        q = hidden_size * queries if self.q_rank is None else self.q_rank * (hidden_size + queries)
        kv = hidden_size * self.head_dim + self.rank * self.num_heads * (self.plain_dim + self.head_width)
        return q + kv + hidden_size * self.num_heads * self.head_width


class MlpLayout(StrEnum):
    """How a checkpoint holds the gates and ups of a feed-forward."""

    SEPARATE = "separate"
    """A tensor each: `Names.gate`, `Names.up`."""
    STACKED = "stacked"
    """`Names.gate_up`: all gates, then all ups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A feed-forward: ``down(activation(gate x) * up x)``, or ``down(activation(up x))`` where it has no gate."""

    width: int
    activation: Activation | LearnedActivation
    """A learned one has no gate."""
    gated: bool = True
    biased: bool = False
    layout: MlpLayout = MlpLayout.SEPARATE
    """Of gates and ups."""
    gate_multiplier: float = 1.0
    """Factor of gates, before their activation."""
    down_multiplier: float = 1.0
    """Factor of the result."""
    down_norm: NormSpec | None = None
    """Of what is activated, before `Names.down`: `Names.down_norm`."""
    curve: tuple[float, float, float, float] | None = None
    """Of a learned activation: what its checkpoint's tensors ``alpha_p``, ``alpha_n``, ``beta`` and ``eps`` would say; None: they
    do."""

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        return hidden_size * self.width * (3 if self.gated else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """Two mixers side by side: the sum of what each makes of the layer's input, with factors before and behind."""

    state: Mamba2Spec
    attention: AttentionSpec
    state_factors: tuple[float, float] = (1.0, 1.0)
    attention_factors: tuple[float, float] = (1.0, 1.0)

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        return self.state.num_parameters(hidden_size) + self.attention.num_parameters(hidden_size)


StateSpec = MambaSpec | Mamba2Spec | ShortConvSpec | DeltaSpec
"""Mixers that keep a state of fixed size, and no keys and values."""
MixerSpec = AttentionSpec | LatentSpec | StateSpec | BesideSpec
"""What mixes tokens; `quintet.executor.models.blocks.block` builds each kind."""
FeedForwardSpec = MlpSpec | ExpertsSpec
"""What each token goes through by itself, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: MixerSpec | None
    """None: the layer has none, as it may have no ``mlp``."""
    mlp: FeedForwardSpec | None
    mixer_norms: Norms
    mlp_norms: Norms
    parallel: bool = False
    """Whether the feed-forward reads what the mixer reads, ``x + mixer(norm x) + mlp(norm x)``: through the mixer's norm, or
    through one of its own where ``mlp_norms`` has one before it."""
    residual_multiplier: float = 1.0
    """Factor of what the mixer and the feed-forward add."""
    residual_of_norm: bool = False
    """Whether they add to what their norms gave, rather than to what the norms were given."""

    @property
    def attention(self) -> AttentionSpec | LatentSpec | None:
        """The mixer, or the part of it that attends."""
        match self.mixer:
            case AttentionSpec() | LatentSpec():
                return self.mixer
            case BesideSpec():
                return self.mixer.attention
            case _:
                return None

    @property
    def state(self) -> StateSpec | None:
        """The mixer, or the part of it that keeps a state."""
        match self.mixer:
            case AttentionSpec() | LatentSpec() | None:
                return None
            case BesideSpec():
                return self.mixer.state
            case _:
                return self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Positions that are added: a row of `Names.positions` is added to each token's embedding."""

    count: int
    """How many positions there are."""
    offset: int = 0
    """The row of position 0. The table has ``count + offset`` rows."""
    sinusoidal: bool = False
    """Whether the rows are computed, ``Names.positions`` being nothing then: of row r sines, then cosines, of r times a geometric
    series from 1 down to 1 / 10000 (Vaswani et al., "Attention is all you need", 2017, as in its authors' tensor2tensor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder. A `ModelSpec`."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    reach: int
    """See `ModelSpec`."""
    final_norm: NormSpec | None
    names: Names = field(default_factory=Names)
    transposed: bool = False
    """Whether the checkpoint's matrices within layers are ``[in, out]``."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    positions: PositionTable | None = None
    embedding_width: int | None = None
    """Of the embedding's rows where it is not the hidden size: `Names.project_in` and `Names.project_out` lie between."""
    embedding_scale: float = 1.0
    """Factor of every embedding."""
    embedding_norm: NormSpec | None = None
    head_bias: bool = False
    normalised_head: bool = False
    """Whether each row of the output layer is divided by its length."""
    logit_scale: float = 1.0
    """Factor of every logit."""
    logit_softcap: float | None = None
    """Logits become ``softcap * tanh(logit / softcap)``, after the factor."""

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec | None, ...]:
        """The attention of each layer."""
        return tuple(layer.attention for layer in self.layers)

    @property
    def kv_needs(self) -> tuple[KvNeed | None, ...]:
        """See `ModelSpec`."""
        return tuple(None if each is None else each.kv_need for each in self.attentions)

    @property
    def state_needs(self) -> tuple[StateNeed | None, ...]:
        """See `ModelSpec`."""
        return tuple(None if layer.state is None else layer.state.state_need for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotations that layers have, each once."""
        ropes = (each.rope for each in self.attentions if each is not None)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def fixed_rope_len(self) -> int | None:
        """See `ModelSpec`."""
        return min((rope.fixed_len for rope in self.ropes if rope.fixed_len is not None), default=None)

    @property
    def num_parameters(self) -> int:
        """See `ModelSpec`."""
        hidden, width = self.hidden_size, self.embedding_width or self.hidden_size
        blocks = [block for layer in self.layers for block in (layer.mixer, layer.mlp) if block is not None]
        layers = sum(block.num_parameters(hidden) for block in blocks)
        projections = 2 * hidden * width if self.embedding_width else 0
        learned = self.positions is not None and not self.positions.sinusoidal
        positions = (
            (self.positions.count + self.positions.offset) * hidden if self.positions and learned else 0
        )
        return layers + projections + positions + self.vocab_size * width * (1 if self.tied else 2)
