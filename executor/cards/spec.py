"""What tells one decoder from another. Imports no torch: see `quintet.executor.models.decoder` for what is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.executor.cards.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that tells one such model from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where it sees everything."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation (Qwen3)."""
    tied: bool = False
    """Whether the output layer is the embedding."""

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.windows)

    @property
    def num_parameters(self) -> int:
        """Numbers of all matrices: what the memory for weights is made of."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied else 2)
