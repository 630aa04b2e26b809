"""Command R and A: parallel attention and feed-forward after one norm without bias, interleaved rotation."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.rope import MAX_POSITIONS
from quintet.executor.model_config.shape import (
    SLIDING,
    attention,
    decoder,
    every_full,
    gated,
    layer_kinds,
    layer_norm,
    num_layers,
    rotated_reach,
    side_by_side,
    window,
)
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, QkNormOver


def cohere(card: ModelCard) -> DecoderSpec:
    """Command R; R+ norms queries and keys with separate weights per head."""
    norm = layer_norm(card, biased=False)
    biased, normed = card.flag("attention_bias", False), card.flag("use_qk_norm", False)
    mixer = attention(
        card,
        positions=8192,
        theta=500000.0,
        interleaved=True,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=norm if normed else None,
        qk_norm_over=QkNormOver.OWN,
    )
    return _decoder(card, (mixer,) * num_layers(card))


def cohere2(card: ModelCard) -> DecoderSpec:
    """Command R7B and A: three of four layers have a sliding window and rotation; the others have neither."""
    biased = card.flag("attention_bias", False)
    mixer = attention(card, positions=8192, interleaved=True, qkv_bias=biased, output_bias=biased)
    sliding, full = replace(mixer, window=window(card, 4096)), replace(mixer, rope=None)
    kinds = layer_kinds(card, every_full(card, card.whole("sliding_window_pattern", 1, 1024, 4)))
    return _decoder(card, tuple(sliding if kind == SLIDING else full for kind in kinds))


def _decoder(card: ModelCard, mixers: tuple[AttentionSpec, ...]) -> DecoderSpec:
    """Build the decoder; a card's ``model_max_length``, if present, is the final context length."""
    norm, mlp = layer_norm(card, biased=False), gated(card)
    reach = rotated_reach(card, [mixer.rope for mixer in mixers])
    return decoder(
        card,
        tuple(side_by_side(norm, mixer, mlp) for mixer in mixers),
        norm,
        tied=card.flag("tie_word_embeddings", True),
        reach=card.whole("model_max_length", 1, MAX_POSITIONS, reach),
        logit_scale=card.real("logit_scale", 1e-6, 1e6, 0.0625),
    )


FAMILIES = {
    "CohereForCausalLM": Family(cohere, "Command R and R+, Aya"),
    "Cohere2ForCausalLM": Family(cohere2, "Command R7B and A"),
}
