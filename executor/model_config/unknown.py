"""Models without a registry entry: provided by another package, or run in transformers.

Reads the usual keys of a card; the executor compares them with the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    HIDDEN,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    head_width,
    max_positions,
    num_heads,
    num_kv_heads,
    num_layers,
)
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.model_config.state_specs import StateNeed
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UnknownSpec:
    """Implements `quintet.executor.model_config.spec.ModelSpec`."""

    vocab_size: int
    kv_needs: tuple[KvNeed | None, ...]
    reach: int
    fixed_rope_len: int | None
    num_parameters: int | None = None
    state_needs: tuple[StateNeed | None, ...] = ()


def unknown(card: ModelCard) -> UnknownSpec:
    """Read the values needed for serving. An unsupported rotation type does not extend the context.

    Of a multimodal card, read the section for text.
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
    """Return every layer's keys and values: uncompressed heads, even for latent attention."""
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
    """Return the card for one layer, with overrides from ``per_layer_config`` by layer number."""
    own = card.section("per_layer_config").section(str(index))
    return replace(card, values={**card.values, **own.values}) if own.values else card
