"""Models that no row of the registry knows and another package brings: as much as the usual spellings of a card tell."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.families.shape import (
    MAX_VOCAB,
    head_width,
    max_positions,
    num_kv_heads,
    num_layers,
)
from quintet.executor.cards.rope import rope_spec
from quintet.executor.cards.spec import KvNeed
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UnknownSpec:
    """A `quintet.executor.cards.spec.ModelSpec`."""

    vocab_size: int
    kv_needs: tuple[KvNeed, ...]
    reach: int
    fixed_rope_len: int | None
    num_parameters: int | None = None


def unknown(card: ModelCard) -> UnknownSpec:
    """Read what serving needs. A rotation that only the model's own package may know stretches nothing here."""
    dim = head_width(card)
    reach, fixed_rope_len = max_positions(card), None
    try:
        rope = rope_spec(card, dim, reach)
        reach, fixed_rope_len = rope.reach, rope.fixed_len
    except ConfigError:
        pass
    return UnknownSpec(
        vocab_size=card.whole("vocab_size", 1, MAX_VOCAB),
        kv_needs=(KvNeed(num_kv_heads(card), dim, dim),) * num_layers(card),
        reach=reach,
        fixed_rope_len=fixed_rope_len,
    )
