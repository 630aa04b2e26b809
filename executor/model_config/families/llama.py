"""Llama, and models that differ from it in one setting: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.shape import (
    attention,
    decoder,
    gated,
    layered_windows,
    num_layers,
    pre_norm,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import DecoderSpec


def llama(card: ModelCard) -> DecoderSpec:
    """Llama 1, 2 and 3, with optional biases of attention and feed-forward."""
    biased = card.flag("attention_bias", False)
    mixer = attention(card, positions=2048, qkv_bias=biased, output_bias=biased)
    layer = pre_norm(rms(card), mixer, gated(card, biased=card.flag("mlp_bias", False)))
    return decoder(card, (layer,) * num_layers(card), rms(card))


def mistral(card: ModelCard) -> DecoderSpec:
    """Mistral: every layer has the card's sliding window, if any."""
    mixer = attention(card, positions=131072, kv_heads=8, window=window(card, 4096))
    return decoder(card, (pre_norm(rms(card), mixer, gated(card)),) * num_layers(card), rms(card))


def qwen2(card: ModelCard) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    layer = pre_norm(rms(card), attention(card, positions=32768, qkv_bias=True), gated(card))
    return decoder(card, windowed(layer, layered_windows(card)), rms(card))


def qwen3(card: ModelCard) -> DecoderSpec:
    """Qwen3: norms of queries and keys, explicit head width."""
    biased = card.flag("attention_bias", False)
    mixer = attention(
        card, positions=32768, head_dim=128, qk_norm=rms(card), qkv_bias=biased, output_bias=biased
    )
    layer = pre_norm(rms(card), mixer, gated(card))
    return decoder(card, windowed(layer, layered_windows(card)), rms(card))


def bitnet(card: ModelCard) -> DecoderSpec:
    """BitNet b1.58: inner norms before the output projections (Ma et al., "BitNet b1.58 2B4T", 2025)."""
    norm, biased = rms(card, 1e-5), card.flag("attention_bias", False)
    mixer = attention(
        card,
        positions=2048,
        theta=500000.0,
        qkv_bias=biased,
        output_bias=biased,
        attended_norm=norm,
    )
    layer = pre_norm(norm, mixer, gated(card, "relu2", down_norm=norm))
    return decoder(card, (layer,) * num_layers(card), norm)


def mimo(card: ModelCard) -> DecoderSpec:
    """MiMo: Qwen2; `quintet.executor.model_config.mtp` has its multi-token prediction layer."""
    spec = qwen2(card)
    return replace(spec, names=replace(spec.names, ignored=("model.mtp_layers.*",)))


FAMILIES = {
    "LlamaForCausalLM": Family(llama, "Llama 1, 2 and 3, CodeLlama, Vicuna"),
    "LLaMAForCausalLM": Family(llama, "first conversions of Llama 1"),
    "MistralForCausalLM": Family(mistral, "Mistral 7B"),
    "Qwen2ForCausalLM": Family(qwen2, "Qwen 2 and 2.5"),
    "MiMoForCausalLM": Family(mimo, "MiMo 7B"),
    "BitNetForCausalLM": Family(bitnet, "BitNet b1.58"),
    "Qwen3ForCausalLM": Family(qwen3, "Qwen 3"),
}
