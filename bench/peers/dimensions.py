"""Dimensions of the models, for counts of operations and bytes in all file formats."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.models import SHAPES
from bench.peers.random_gguf import CONFIGS


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Width of the feed-forward layer; with experts, the sum of the chosen experts' widths."""
    vocab_size: int


DIMENSIONS = {
    name: Dimensions(
        shape.hidden,
        shape.layers,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.intermediate,
        shape.vocab_size,
    )
    for name, shape in SHAPES.items()
} | {
    name: Dimensions(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"] * config.get("num_experts_per_tok", 1),
        config["vocab_size"],
    )
    for name, config in CONFIGS.items()
}
"""Dimensions by model name."""
