"""Models that no row of the registry knows: another package brings them, or transformers computes them.

As much as the usual spellings of a card tell; the executor compares it with what the model then asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.families.shape import (
    HIDDEN,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    head_width,
    max_positions,
    num_heads,
    num_kv_heads,
    num_layers,
)
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.model_config.state_specs import StateNeed
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UnknownSpec:
    """A `quintet.executor.model_config.spec.ModelSpec`."""

    vocab_size: int
    kv_needs: tuple[KvNeed | None, ...]
    reach: int
    fixed_rope_len: int | None
    num_parameters: int | None = None
    state_needs: tuple[StateNeed | None, ...] = ()


def unknown(card: ModelCard) -> UnknownSpec:
    """Read what serving needs. A rotation that only the model's own package may know stretches nothing here.

    Of a card for several kinds of input the section for text counts.
    """
    text = card.section("text_config")
    if text.values and not card.has(HIDDEN):
        card = text
    needs = _kv_needs(card)
    reach, fixed_rope_len = max_positions(card), None
    try:
        rope = rope_spec(card, needs[0].key_dim, reach)
        reach, fixed_rope_len = rope.reach, rope.fixed_len
    except ConfigError:
        pass
    return UnknownSpec(
        vocab_size=card.whole("vocab_size", 1, MAX_VOCAB),
        kv_needs=needs,
        reach=reach,
        fixed_rope_len=fixed_rope_len,
    )


def _kv_needs(card: ModelCard) -> tuple[KvNeed, ...]:
    """Return every layer's keys and values: whole heads, where a card describes latent attention too."""
    if card.has("qk_rope_head_dim") and card.has("v_head_dim"):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        key_dim = sum(card.whole(part, 0, MAX_HEAD_DIM) for part in parts)
        value_dim = card.whole("v_head_dim", 1, MAX_HEAD_DIM)
        return (KvNeed(num_heads(card), key_dim, value_dim),) * num_layers(card)
    return tuple(_kv_need(_card_of_layer(card, index)) for index in range(num_layers(card)))


def _kv_need(card: ModelCard) -> KvNeed:
    dim = head_width(card)
    return KvNeed(num_kv_heads(card), dim, dim)


def _card_of_layer(card: ModelCard, index: int) -> ModelCard:
    """Return the card as it is for one layer: some say what differs in ``per_layer_config``, by the layer's number."""
    own = card.section("per_layer_config").section(str(index))
    return replace(card, values={**card.values, **own.values}) if own.values else card
