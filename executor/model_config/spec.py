"""Specifications of models as values: read from a config, followed by the model builder.

A `DecoderSpec` is a tuple of layers: mixer, feed-forward and norms. Imports no torch. `quintet.executor.models.decoder`
builds the model; `quintet.executor.model_config.registry` has the readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormKind, Norms, NormSpec
from quintet.executor.model_config.rope import RopeSpec
from quintet.executor.model_config.state_specs import (
    DeltaSpec,
    KvNeed,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateNeed,
)

__all__ = ["KvNeed", "NormKind", "NormSpec", "Norms"]  # re-exported


class ModelSpec(Protocol):
    """The properties of a model that must be known before it is built."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def kv_needs(self) -> tuple[KvNeed | None, ...]:
        """KV memory that each layer keeps per token."""

    @property
    def state_needs(self) -> tuple[StateNeed | None, ...]:
        """State that each layer keeps per request; empty if no layer has a state."""

    @property
    def reach(self) -> int:
        """The maximum context length of the position encoding."""

    @property
    def fixed_rope_len(self) -> int | None:
        """Minimum over all layers of `quintet.executor.model_config.rope.RopeSpec.fixed_len`."""

    @property
    def num_parameters(self) -> int | None:
        """Number of matrix elements, to estimate weight memory. None if only the executor can determine it."""


class Activation(StrEnum):
    """Activation function of a feed-forward or of a gate."""

    SILU = "silu"
    GELU = "gelu"
    """Exact, with the error function."""
    GELU_TANH = "gelu_tanh"
    """Approximated with a hyperbolic tangent."""
    RELU = "relu"
    RELU2 = "relu2"
    """ReLU, squared."""
    QUICK_GELU = "quick_gelu"
    """``x * sigmoid(1.702 x)``."""
    SIGMOID = "sigmoid"


class LearnedActivation(StrEnum):
    """Activation function with parameters in the checkpoint."""

    XIELU = "xielu"
    """xIELU, see `quintet.executor.backends.cpu.ops.activation.xielu`; parameters: `Names.activation`."""


class QkvLayout(StrEnum):
    """Layout of query, key and value weights in a checkpoint."""

    SEPARATE = "separate"
    """Separate tensors: `Names.q`, `Names.k`, `Names.v`."""
    STACKED = "stacked"
    """`Names.qkv`: all queries, then all keys, then all values."""
    GROUPED = "grouped"
    """`Names.qkv`: for each KV head its queries, its key, its value."""
    QUARTERS = "quarters"
    """`Names.qkv` in 4 parts, each with a quarter of the heads: queries, values, keys. No KV head is shared."""


class QkNormOver(StrEnum):
    """Scope of a query or key norm."""

    HEAD = "head"
    """Each head separately, with one weight for all heads."""
    OWN = "own"
    """Each head separately with its own weight: a tensor ``[heads, head_dim]``, or one per head if the name has ``{head}``."""
    WHOLE = "whole"
    """All heads together."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Query scaling by ``max(1, 1 + growth * log(1 + (position + shift) / period))``; ``whole``: floor the quotient."""

    growth: float
    period: int
    shift: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a query or key of one head."""
    value_dim: int
    scale: float
    """Factor of every score."""
    rope: RopeSpec | None
    """Rotation of queries and keys by position; None for none."""
    interleaved: bool = False
    """True if elements (2i, 2i + 1) are rotated as a pair, instead of i and i + half."""
    alibi: tuple[float, ...] = ()
    """ALiBi slopes, one per head: slope times (key position minus query position) is added to a score. Empty: none."""
    window: int | None = None
    """Sliding window in tokens, including the token itself; None for full attention."""
    chunk: int | None = None
    """Chunk length: a token attends only to tokens of its own chunk; None for full attention."""
    causal: bool = True
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: bool = False
    """True if each head has an attention sink, `Names.sinks`: an extra logit in its softmax."""
    qk_norm: NormSpec | None = None
    """Norm of queries and keys before rotation: `Names.q_norm` and `Names.k_norm`."""
    qk_norm_over: QkNormOver = QkNormOver.HEAD
    qk_norm_after_rope: bool = False
    """True if that norm follows the rotation instead; over heads."""
    temperature: Temperature | None = None
    """Scaling of queries after rotation."""
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    """Clipping limit of queries, keys and values."""
    output_gate: bool = False
    """True if `Names.q` has a gate after each head's query; its sigmoid multiplies the head's attention output."""
    layout: QkvLayout = QkvLayout.SEPARATE
    attended_norm: NormSpec | None = None
    """Norm over all heads' attention output, before `Names.output`: `Names.attended_norm`."""

    @property
    def kv_need(self) -> KvNeed:
        """KV memory per token."""
        return KvNeed(self.num_kv_heads, self.head_dim, self.value_dim, self.window, self.chunk)

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        keys = self.head_dim * (self.num_heads * (2 if self.output_gate else 1) + self.num_kv_heads)
        return hidden_size * (keys + self.value_dim * (self.num_heads + self.num_kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    KV memory holds one latent vector per token, the source of all keys and values, and one shared rotated key."""

    num_heads: int
    plain_dim: int
    """Unrotated elements of a head's query."""
    rope_dim: int
    """Rotated elements of a head's query."""
    head_width: int
    """Elements of a head's output."""
    rank: int
    """Elements of the latent: `Names.kv_a` computes it, `Names.kv_b` computes keys and values from it."""
    q_rank: int | None
    """Elements of the query latent: `Names.q_a`, `Names.q_b`; None: `Names.q` computes queries directly."""
    scale: float
    """Factor of every score."""
    rope: RopeSpec
    interleaved: bool
    """See `AttentionSpec`."""
    norm: NormSpec
    """Norm of latents: `Names.kv_a_norm`, `Names.q_a_norm`."""
    biased: bool = False
    """True if the latent projections and `Names.output` have biases."""
    window: None = None

    @property
    def num_kv_heads(self) -> int:
        """Number of cached KV heads: 1, shared by all heads."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of a cached key, and of the queries matched against it."""
        return self.rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of a cached value: the latent."""
        return self.rank

    @property
    def kv_need(self) -> KvNeed:
        """KV memory per token."""
        return KvNeed(1, self.head_dim, self.rank, values_in_keys=True)

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        queries = self.num_heads * (self.plain_dim + self.rope_dim)
        q = hidden_size * queries if self.q_rank is None else self.q_rank * (hidden_size + queries)
        kv = hidden_size * self.head_dim + self.rank * self.num_heads * (self.plain_dim + self.head_width)
        return q + kv + hidden_size * self.num_heads * self.head_width


class MlpLayout(StrEnum):
    """Layout of gate and up weights in a checkpoint."""

    SEPARATE = "separate"
    """Separate tensors: `Names.gate`, `Names.up`."""
    STACKED = "stacked"
    """`Names.gate_up`: all gates, then all ups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A feed-forward: ``down(activation(gate x) * up x)``, or ``down(activation(up x))`` without a gate."""

    width: int
    activation: Activation | LearnedActivation
    """A learned activation has no gate."""
    gated: bool = True
    biased: bool = False
    layout: MlpLayout = MlpLayout.SEPARATE
    """Layout of gates and ups."""
    gate_multiplier: float = 1.0
    """Factor of gates before the activation."""
    down_multiplier: float = 1.0
    """Factor of the output."""
    down_norm: NormSpec | None = None
    """Norm of the activated values before `Names.down`: `Names.down_norm`."""
    curve: tuple[float, float, float, float] | None = None
    """Fixed parameters ``alpha_p``, ``alpha_n``, ``beta`` and ``eps`` of a learned activation; None: read from the checkpoint."""

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        return hidden_size * self.width * (3 if self.gated else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMixerSpec:
    """A state mixer and attention in parallel: the sum of their outputs, with factors of input and output."""

    state: Mamba2Spec
    attention: AttentionSpec
    state_factors: tuple[float, float] = (1.0, 1.0)
    attention_factors: tuple[float, float] = (1.0, 1.0)

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        return self.state.num_parameters(hidden_size) + self.attention.num_parameters(hidden_size)


StateSpec = MambaSpec | Mamba2Spec | ShortConvSpec | DeltaSpec
"""Mixers with a state of fixed size and no KV memory."""
MixerSpec = AttentionSpec | LatentSpec | StateSpec | ParallelMixerSpec
"""Token mixers; `quintet.executor.models.sublayers.layer` builds each kind."""
FeedForwardSpec = MlpSpec | ExpertsSpec
"""Per-token layers; `quintet.executor.models.sublayers.layer` builds each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: MixerSpec | None = None
    """None for a layer without a mixer, as ``mlp`` for one without a feed-forward."""
    mlp: FeedForwardSpec | None = None
    mixer_norms: Norms = field(default_factory=Norms)
    mlp_norms: Norms = field(default_factory=Norms)
    parallel: bool = False
    """True for ``x + mixer(norm x) + mlp(norm x)``, with the mixer's norm unless ``mlp_norms`` has one."""
    residual_multiplier: float = 1.0
    """Factor of the mixer's and feed-forward's outputs before the residual addition."""
    residual_of_norm: bool = False
    """True if the residual is the norm's output instead of its input."""

    @property
    def attention(self) -> AttentionSpec | LatentSpec | None:
        """The mixer, or its attention part; None without attention."""
        mixer = self.mixer.attention if isinstance(self.mixer, ParallelMixerSpec) else self.mixer
        return mixer if isinstance(mixer, AttentionSpec | LatentSpec) else None

    @property
    def state(self) -> StateSpec | None:
        """The mixer, or its state part; None without a state."""
        mixer = self.mixer.state if isinstance(self.mixer, ParallelMixerSpec) else self.mixer
        return None if isinstance(mixer, AttentionSpec | LatentSpec) else mixer

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        return sum(each.num_parameters(hidden_size) for each in (self.mixer, self.mlp) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Absolute positions: a row of `Names.positions` is added to each token's embedding."""

    count: int
    """Number of positions."""
    offset: int = 0
    """The row of position 0. The table has ``count + offset`` rows."""
    sinusoidal: bool = False
    """True for computed rows: sines, then cosines, of the row times a geometric series from 1 to 1 / 10000.

    Vaswani et al., "Attention is all you need", 2017, as in tensor2tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only model. Implements `ModelSpec`."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    reach: int
    """See `ModelSpec`."""
    final_norm: NormSpec | None
    names: Names = field(default_factory=Names)
    transposed: bool = False
    """True if the checkpoint's layer matrices are ``[in, out]``."""
    tied: bool = False
    """True if the output layer shares the embedding's weights."""
    positions: PositionTable | None = None
    embedding_width: int | None = None
    """Embedding width if it differs from the hidden size: `Names.project_in` and `Names.project_out` convert."""
    embedding_scale: float = 1.0
    """Factor of every embedding."""
    embedding_norm: NormSpec | None = None
    head_bias: bool = False
    normalised_head: bool = False
    """True if each row of the output layer is divided by its L2 norm."""
    logit_scale: float = 1.0
    """Factor of every logit."""
    logit_softcap: float | None = None
    """Logits become ``softcap * tanh(logit / softcap)``, after the factor."""

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec | None, ...]:
        """The attention of each layer; None for a layer without."""
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
        """The distinct rotations of all layers."""
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
        layers = sum(layer.num_parameters(hidden) for layer in self.layers)
        projections = 2 * hidden * width if self.embedding_width else 0
        learned = self.positions is not None and not self.positions.sinusoidal
        positions = (
            (self.positions.count + self.positions.offset) * hidden if self.positions and learned else 0
        )
        return layers + projections + positions + self.vocab_size * width * (1 if self.tied else 2)
