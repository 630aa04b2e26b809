"""Dimensions that the models' operations and bytes follow from, for all file formats."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.large import CONFIGS
from bench.peers.models import SHAPES


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Of the feed-forwards that a token passes: with experts, of those that it chooses together."""
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
"""By name."""
