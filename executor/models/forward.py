"""A forward pass as a model writes it: a handful of operations on values, top to bottom.

What a value is, is the pass's affair: a tensor, where operations compute at once (`quintet.executor.eager`), or a place in
memory, where they are recorded once and run later with one call per step (`quintet.executor.program`). So a model knows
neither batches nor block tables nor the step it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from quintet.executor.layers.linear import Embedding, Linear

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Causal attention of one layer over its own KV memory, rotation of queries and keys included."""

    index: int
    """Which layer's KV memory."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """How many numbers of a head are rotated, from the first."""
    scale: float
    """Factor of every score."""
    window: int | None = None
    """How many of the newest tokens a token sees, itself included; None for all."""
    q_norm: torch.Tensor | None = None
    """[head_dim]: RMS norm of each query head before rotation; ``k_norm`` likewise. Both or neither."""
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0


class ForwardPass(Protocol[ValueT]):
    """The operations. A value is ``[rows, width]`` in the model's dtype; a row is a token of the step."""

    def embedding(self, layer: Embedding) -> ValueT:
        """Return the embedding of each of the step's tokens."""

    def rms_norm(self, x: ValueT, weight: torch.Tensor, eps: float) -> ValueT:
        """See `quintet.executor.ops.rms_norm`."""

    def linear(self, layer: Linear, x: ValueT, residual: ValueT | None = None) -> ValueT:
        """Return ``residual + layer(x)``. ``residual`` may be overwritten: it is not to be used again."""

    def attention(self, layer: AttentionLayer, qkv: ValueT) -> ValueT:
        """Store the keys and values of ``qkv`` (queries, keys, values of all heads side by side), then attend.

        Returns ``[rows, num_heads * head_dim]``.
        """
