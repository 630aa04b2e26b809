"""Attention of one layer, as a model declares it: the whole vocabulary, for every pass to read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import NormKind, Temperature
from quintet.executor.models.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Which of the tokens up to its own a token sees. At most one of the two is set."""

    window: int | None = None
    """The newest so many, itself included; None for all."""
    chunk: int | None = None
    """Those of its own chunk: positions are cut into chunks of so many (Llama 4); None for all."""

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, self
        assert (self.window or 1) > 0 and (self.chunk or 1) > 0, self


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's heads are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int


@dataclass(slots=True, eq=False)
class KvScales:
    """What a layer's keys and values are divided by before they are rounded to fp8, and multiplied with where they are read.

    Set once, while a checkpoint is loaded that has them; other caches than fp8 do not look.
    """

    key: torch.Tensor | None = None
    """fp32 ``[num_kv_heads]`` in the host's memory; None: 1. ``value`` likewise."""
    value: torch.Tensor | None = None

    @property
    def of_layer(self) -> tuple[float, float]:
        """Those of keys and of values, where all heads have the same."""
        return _only(self.key), _only(self.value)


def _only(scales: torch.Tensor | None) -> float:
    if scales is None:
        return 1.0
    (value,) = set(scales.tolist())
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer:
    """Causal attention of one layer over its own KV memory, norms and rotation of queries and keys included.

    In this order: norms, rotation, temperature; scores times ``scale``, cap, ALiBi, mask, softmax with sinks.
    """

    index: int
    """Which layer's KV memory."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a query's or key's head, up to 576."""
    scale: float
    """Factor of every score."""
    value_dim: int | None = None
    """Numbers of a value's head, up to 512; None: as many as a key's."""
    values_in_keys: bool = False
    """Whether a value is what its key begins with, and not stored by itself: latent attention."""
    rope: int | None = None
    """Which of the model's rotations turns queries and keys; None: no positions are rotated in."""
    rotary_dim: int = 0
    """How many numbers of a head are rotated: even, as many as that rotation has."""
    rotary_first: int = 0
    """From which number of a head on: latent attention rotates a tail."""
    interleaved: bool = False
    """Whether numbers ``2 i`` and ``2 i + 1`` are a pair that is turned (GPT-J), rather than ``i`` and ``i + rotary_dim / 2``."""
    window: int | None = None
    """See `AttentionWindow`."""
    chunk: int | None = None
    """See `AttentionWindow`."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    alibi_slopes: torch.Tensor | None = None
    """fp32 ``[num_heads]``: times the distance (negative) to a key, added to its score (Press et al., "Train short, test
    long", 2022)."""
    sinks: torch.Tensor | None = None
    """fp32 ``[num_heads]``: a score of each head that takes its share of the softmax and has no value (gpt-oss)."""
    q_norm: Norm | None = None
    """Of each query head before rotation: ``head_dim`` wide. ``k_norm`` likewise of each key head."""
    k_norm: Norm | None = None
    norms_behind: bool = False
    """Whether both are behind the rotation instead (HunYuan)."""
    temperature: Temperature | None = None
    """Of queries, after their rotation."""
    kv_scales: KvScales = field(default_factory=KvScales)
    kept_kv_heads: KeptRange | None = None
    """Which of the model's KV heads these are, of a rank; None: all."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert (self.rope is None) == (self.rotary_dim == 0), (self.rope, self.rotary_dim)
        assert self.rotary_dim % 2 == 0 and self.rotary_first + self.rotary_dim <= self.head_dim, (
            self.rotary_dim
        )
        if self.values_in_keys:
            assert self.value_width <= self.head_dim and self.k_norm is None, (
                self.value_width,
                self.head_dim,
            )
            assert self.rope is None or self.rotary_first >= self.value_width, self.rotary_first
        assert not self.norms_behind or self.norms_with_rotation is not None, (
            "of norms behind only usual ones are known"
        )

    @property
    def value_width(self) -> int:
        """Numbers of a value's head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def heads(self) -> Heads:
        """How many there are, and how wide."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_width)

    @property
    def sight(self) -> AttentionWindow:
        """What a token sees."""
        return AttentionWindow(self.window, self.chunk)

    @property
    def is_product(self) -> bool:
        """Whether a score is the product of query and key and scale, and nothing else takes part in the softmax."""
        return self.softcap is None and self.alibi_slopes is None and self.sinks is None

    @property
    def norms_with_rotation(self) -> tuple[Norm, Norm] | None:
        """Both norms, where they are of the kind that the kernels compute together with the rotation."""
        q, k = self.q_norm, self.k_norm
        if q is None or k is None or (q.eps, q.offset) != (k.eps, k.offset):
            return None
        for norm in (q, k):
            rounds = norm.rounds_once and not norm.offset  # which the kernels tell by the offset
            if norm.kind is not NormKind.RMS or norm.weight is None or norm.is_per_group or rounds:
                return None
        return q, k
