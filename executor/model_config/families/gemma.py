"""Gemma 1, 2 and 3 (text): scaled embeddings, norm weights with offset 1, norms before and after blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    FULL,
    SLIDING,
    attention,
    decoder,
    every_full,
    gated,
    head_width,
    hidden_size,
    layer_kinds,
    nullable,
    num_layers,
    pre_norm,
    refuse,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    Norms,
)

_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Default values of the text part in a multimodal card."""


def gemma(card: ModelCard) -> DecoderSpec:
    """Gemma 1: Llama's layer."""
    mixer = _attention(card, positions=8192)
    layer = pre_norm(rms(card, offset=1.0), mixer, _mlp(card))
    return _decoder(card, (layer,) * num_layers(card))


def gemma2(card: ModelCard) -> DecoderSpec:
    """Gemma 2: soft caps of scores and logits; every other layer has a sliding window."""
    mixer, width = _capped(card, positions=8192), window(card, 4096)
    kinds = layer_kinds(card, every_full(card, 2))
    layers = (_layer(card, replace(mixer, window=width if kind == SLIDING else None)) for kind in kinds)
    return _decoder(card, tuple(layers), cap=30.0, names=Names(mlp_norm="pre_feedforward_layernorm"))


def vault_gemma(card: ModelCard) -> DecoderSpec:
    """VaultGemma: Gemma 2 without the norms after blocks."""
    mixer, width, norm = _capped(card, positions=8192), window(card, 4096), rms(card, offset=1.0)
    kinds = layer_kinds(card, every_full(card, 2))
    layer = pre_norm(norm, mixer, _mlp(card))
    layers = windowed(layer, (width if kind == SLIDING else None for kind in kinds))
    return _decoder(card, layers, cap=30.0, names=Names(mlp_norm="pre_feedforward_layernorm"))


def gemma3(card: ModelCard) -> DecoderSpec:
    """Gemma 3, the text model: norms of queries and keys; five of six layers have a sliding window and another rotation."""
    card = replace(card, values={**_GEMMA3, **card.values})
    kinds = layer_kinds(card, every_full(card, card.whole("sliding_window_pattern", 1, 1024, 6)))
    dim = head_width(card, 256)
    full = rope_spec(card, dim, 131072, theta=1e6, layer_type=FULL)
    local = rope_spec(card, dim, 131072, layer_type=SLIDING, theta_key="rope_local_base_freq", scaled=False)
    mixer = _capped(card, None, rope=full, qk_norm=rms(card, offset=1.0))
    sliding = replace(mixer, rope=local, window=window(card, 4096))
    layers = (_layer(card, sliding if kind == SLIDING else mixer) for kind in kinds)
    return _decoder(card, tuple(layers), names=Names(mlp_norm="pre_feedforward_layernorm"))


def _attention(card: ModelCard, **switches: Any) -> AttentionSpec:
    refuse(card, "use_bidirectional_attention")
    biased = card.flag("attention_bias", False)
    return attention(card, head_dim=256, qkv_bias=biased, output_bias=biased, **switches)


def _mlp(card: ModelCard) -> MlpSpec:
    """Return the feed-forward; Gemma's first cards write ``gelu`` for its tanh approximation."""
    return replace(gated(card, "gelu_pytorch_tanh"), activation=Activation.GELU_TANH)


def _capped(card: ModelCard, default: float | None = 50.0, **switches: Any) -> AttentionSpec:
    """``default``: the cap if the card has none."""
    return _attention(
        card,
        kv_heads=4,
        scale=card.real("query_pre_attn_scalar", 1e-6, 1e6, 256) ** -0.5,
        softcap=nullable(card, "attn_logit_softcapping", 1e-6, 1e6, default),
        **switches,
    )


def _layer(card: ModelCard, mixer: AttentionSpec) -> LayerSpec:
    norm = rms(card, offset=1.0)
    norms = Norms(before=norm, after=norm)
    return LayerSpec(mixer=mixer, mlp=_mlp(card), mixer_norms=norms, mlp_norms=norms)


def _decoder(
    card: ModelCard, layers: tuple[LayerSpec, ...], cap: float | None = None, **switches: Any
) -> DecoderSpec:
    """``cap``: soft cap of logits if the card has none."""
    return decoder(
        card,
        layers,
        rms(card, offset=1.0),
        tied=card.flag("tie_word_embeddings", True),
        embedding_scale=hidden_size(card) ** 0.5,
        logit_softcap=nullable(card, "final_logit_softcapping", 1e-6, 1e6, cap),
        **switches,
    )


FAMILIES = {
    "GemmaForCausalLM": Family(gemma, "Gemma 1, CodeGemma"),
    "Gemma2ForCausalLM": Family(gemma2, "Gemma 2"),
    "VaultGemmaForCausalLM": Family(vault_gemma, "VaultGemma"),
    "Gemma3ForCausalLM": Family(gemma3, "Gemma 3, text"),
}
