"""Llama, and models that differ from it in one setting: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.shape import (
    attention,
    decoder,
    gated,
    layered_windows,
    pre_norm,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import DecoderSpec


def llama(hf_config: HfConfig) -> DecoderSpec:
    """Llama 1, 2 and 3, with optional biases of attention and feed-forward."""
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias")
    layer = pre_norm(rms(hf_config), mixer, gated(hf_config, biased=hf_config.flag("mlp_bias", False)))
    return decoder(hf_config, layer, rms(hf_config))


def mistral(hf_config: HfConfig) -> DecoderSpec:
    """Mistral: every layer has the config's sliding window, if any."""
    mixer = attention(hf_config, positions=131072, kv_heads=8, window=window(hf_config, 4096))
    return decoder(hf_config, pre_norm(rms(hf_config), mixer, gated(hf_config)), rms(hf_config))


def qwen2(hf_config: HfConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    layer = pre_norm(rms(hf_config), attention(hf_config, positions=32768, qkv_bias=True), gated(hf_config))
    return decoder(hf_config, windowed(layer, layered_windows(hf_config)), rms(hf_config))


def qwen3(hf_config: HfConfig) -> DecoderSpec:
    """Qwen3: norms of queries and keys, explicit head width."""
    mixer = attention(
        hf_config, positions=32768, head_dim=128, qk_norm=rms(hf_config), bias_key="attention_bias"
    )
    layer = pre_norm(rms(hf_config), mixer, gated(hf_config))
    return decoder(hf_config, windowed(layer, layered_windows(hf_config)), rms(hf_config))


def bitnet(hf_config: HfConfig) -> DecoderSpec:
    """BitNet b1.58: inner norms before the output projections (Ma et al., "BitNet b1.58 2B4T", 2025)."""
    norm = rms(hf_config, 1e-5)
    mixer = attention(
        hf_config,
        positions=2048,
        theta=500000.0,
        bias_key="attention_bias",
        attended_norm=norm,
    )
    layer = pre_norm(norm, mixer, gated(hf_config, "relu2", down_norm=norm))
    return decoder(hf_config, layer, norm)


def mimo(hf_config: HfConfig) -> DecoderSpec:
    """MiMo: Qwen2; `quintet.executor.model_config.mtp` has its multi-token prediction layer."""
    spec = qwen2(hf_config)
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
