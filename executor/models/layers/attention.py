"""Attention of one layer as a model declares it; every backend reads this description."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import NormKind, Temperature
from quintet.executor.models.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The visible range of earlier tokens. At most one of the two limits is set."""

    window: int | None = None
    """Number of newest tokens, the token itself included; None for all."""
    chunk: int | None = None
    """Chunk length in positions (Llama 4): only the token's own chunk is visible; None for all."""

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, self
        assert (self.window or 1) > 0 and (self.chunk or 1) > 0, self


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers and widths of a layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int


@dataclass(slots=True, eq=False)
class KvScales:
    """Scales of a layer's fp8 KV cache: divisors before rounding, factors after reading.

    Set once by the loader of a checkpoint with scales. Caches of other dtypes ignore them.
    """

    key: torch.Tensor | None = None
    """fp32 ``[num_kv_heads]`` in host memory; None for 1. ``value`` has the same form."""
    value: torch.Tensor | None = None

    @property
    def of_layer(self) -> tuple[float, float]:
        """Scales of keys and of values, if all heads have the same."""
        return _only(self.key), _only(self.value)


def _only(scales: torch.Tensor | None) -> float:
    if scales is None:
        return 1.0
    (value,) = set(scales.tolist())
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer:
    """Causal attention of one layer over its KV memory, with norms and rotation of queries and keys.

    Order: norms, rotation, temperature; then scores times ``scale``, cap, ALiBi, mask, softmax with sinks.
    """

    index: int
    """Layer index of the KV memory."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a query's or key's head, up to 576."""
    scale: float
    """Factor of every score."""
    value_dim: int | None = None
    """Elements of a value's head, up to 512; None: as many as a key's."""
    values_in_keys: bool = False
    """True if a value is a prefix of its key and not stored separately: latent attention."""
    rope: int | None = None
    """Index of the rotation among the model's; None for no rotation."""
    rotary_dim: int = 0
    """Number of rotated elements of a head: even, equal to the rotation's."""
    rotary_first: int = 0
    """First rotated element of a head: latent attention rotates the last ones."""
    interleaved: bool = False
    """True if elements ``2 i`` and ``2 i + 1`` form a pair (GPT-J), instead of ``i`` and ``i + rotary_dim / 2``."""
    window: int | None = None
    """See `AttentionWindow`."""
    chunk: int | None = None
    """See `AttentionWindow`."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    alibi_slopes: torch.Tensor | None = None
    """fp32 ``[num_heads]``: factor of the (negative) distance to a key, added to its score.

    ALiBi: Press et al., "Train short, test long", 2022.
    """
    sinks: torch.Tensor | None = None
    """fp32 ``[num_heads]``: attention sinks, a logit per head without a value (gpt-oss)."""
    q_norm: Norm | None = None
    """Norm of each query head before rotation, ``head_dim`` wide. ``k_norm``: of each key head."""
    k_norm: Norm | None = None
    norms_after_rope: bool = False
    """True if both norms follow the rotation instead (HunYuan)."""
    temperature: Temperature | None = None
    """Scaling of queries after their rotation."""
    kv_scales: KvScales = field(default_factory=KvScales)
    kept_kv_heads: KeptRange | None = None
    """The rank's range of the model's KV heads; None for all."""

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
        assert not self.norms_after_rope or self.norms_with_rotation is not None, (
            "norms after rotation must be fusable with it"
        )

    @property
    def value_width(self) -> int:
        """Elements of a value's head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def heads(self) -> Heads:
        """Numbers and widths of the heads."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_width)

    @property
    def attention_window(self) -> AttentionWindow:
        """The visible range of a token."""
        return AttentionWindow(self.window, self.chunk)

    @property
    def is_product(self) -> bool:
        """True if scores are plain scaled dot products, with no cap, ALiBi or sinks in the softmax."""
        return self.softcap is None and self.alibi_slopes is None and self.sinks is None

    @property
    def norms_with_rotation(self) -> tuple[Norm, Norm] | None:
        """Both norms, if the kernels can fuse them with the rotation; else None."""
        q, k = self.q_norm, self.k_norm
        if q is None or k is None or (q.eps, q.offset) != (k.eps, k.offset):
            return None
        for norm in (q, k):
            rounds = norm.rounds_once and not norm.offset  # the kernels infer this from the offset
            if norm.kind is not NormKind.RMS or norm.weight is None or norm.is_per_group or rounds:
                return None
        return q, k
