"""Llama, and decoders with its tensor names that differ from it in one or two settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    ACTIVATION,
    FULL,
    MAX_LAYERS,
    MAX_WIDTH,
    SLIDING,
    WIDTH,
    Family,
    attention,
    decoder,
    factor,
    gated,
    head_width,
    hidden_size,
    layer_norm,
    normed_layer,
    num_layers,
    plain,
    pre_norm,
    pre_norm_decoder,
    qwen_windows,
    rms,
    side_by_side,
    window,
    windowed,
    windows_by_kind,
)
from quintet.executor.model_config.spec import (
    DecoderSpec,
    FeedForwardSpec,
    LearnedActivation,
    MlpLayout,
    MlpSpec,
    NormKind,
    Norms,
    NormSpec,
    QkNormOver,
    QkvLayout,
    Temperature,
)


def biased_gated(hf_config: HfConfig) -> MlpSpec:
    """Return a gated feed-forward with Llama's flag of biases."""
    return gated(hf_config, biased=hf_config.flag("mlp_bias", False))


def llama(hf_config: HfConfig) -> DecoderSpec:
    """Llama 1, 2 and 3, with optional biases of attention and feed-forward."""
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias")
    return pre_norm_decoder(hf_config, rms(hf_config), mixer, biased_gated(hf_config))


def mistral(hf_config: HfConfig) -> DecoderSpec:
    """Mistral: every layer has the config's sliding window, if any."""
    mixer = attention(hf_config, positions=131072, kv_heads=8, window=window(hf_config, 4096))
    return pre_norm_decoder(hf_config, rms(hf_config), mixer, gated(hf_config))


def qwen2(hf_config: HfConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    layer = pre_norm(rms(hf_config), attention(hf_config, positions=32768, qkv_bias=True), gated(hf_config))
    return decoder(hf_config, windowed(layer, qwen_windows(hf_config)), rms(hf_config))


def qwen3(hf_config: HfConfig) -> DecoderSpec:
    """Qwen3: norms of queries and keys, explicit head width."""
    mixer = attention(
        hf_config, positions=32768, head_dim=128, qk_norm=rms(hf_config), bias_key="attention_bias"
    )
    layer = pre_norm(rms(hf_config), mixer, gated(hf_config))
    return decoder(hf_config, windowed(layer, qwen_windows(hf_config)), rms(hf_config))


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
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config, "relu2", down_norm=norm))


def mimo(hf_config: HfConfig) -> DecoderSpec:
    """MiMo: Qwen2; `quintet.executor.model_config.mtp` has its multi-token prediction layer."""
    spec = qwen2(hf_config)
    return replace(spec, names=replace(spec.names, ignored=("model.mtp_layers.*",)))


def granite(hf_config: HfConfig) -> DecoderSpec:
    """Granite 3: factors of embeddings, scores, residuals and logits."""
    return multiplied_granite(hf_config, biased_gated(hf_config))


def multiplied_granite(hf_config: HfConfig, mlp: FeedForwardSpec, **switches: Any) -> DecoderSpec:
    """Return Granite 3 with this feed-forward; ``switches``: see `decoder`."""
    norms, divisor = Norms(before=rms(hf_config)), factor(hf_config, "logits_scaling")
    return _multiplied(hf_config, 1.0, mlp, norms, logit_scale=1 / divisor, **switches)


def hyperclovax(hf_config: HfConfig) -> DecoderSpec:
    """HyperCLOVA X: Granite's factors, and norms after the blocks as well."""
    norm, has_post_norm = rms(hf_config), hf_config.flag("use_post_norm", True)
    norms = Norms(before=norm, after=norm if has_post_norm else None)
    names = Names(mixer_out_norm="post_norm1", mlp_out_norm="post_norm2")
    scale, logit_scale = head_width(hf_config) ** -0.5, factor(hf_config, "logits_scaling")
    return _multiplied(hf_config, scale, biased_gated(hf_config), norms, logit_scale=logit_scale, names=names)


def _multiplied(
    hf_config: HfConfig, scale: float, mlp: FeedForwardSpec, norms: Norms, **switches: Any
) -> DecoderSpec:
    """``scale``: of scores, if the config has none."""
    scale = factor(hf_config, "attention_multiplier", scale)
    mixer = attention(hf_config, positions=2048, scale=scale, bias_key="attention_bias")
    residual = factor(hf_config, "residual_multiplier")
    layer = normed_layer(norms, mixer, mlp, residual_multiplier=residual)
    embedding_scale = factor(hf_config, "embedding_multiplier")
    return decoder(hf_config, layer, rms(hf_config), embedding_scale=embedding_scale, **switches)


def stablelm(hf_config: HfConfig) -> DecoderSpec:
    """StableLM: 1/4 of each head is rotated; 2-12B has norms of queries and keys, and parallel layers."""
    norm, normed = layer_norm(hf_config), hf_config.flag("qk_layernorm", False)
    mixer = attention(
        hf_config,
        positions=4096,
        share=0.25,
        qkv_bias=hf_config.flag("use_qkv_bias", False),
        qk_norm=replace(norm, biased=False) if normed else None,
        qk_norm_over=QkNormOver.OWN,
    )
    at_once = hf_config.flag("use_parallel_residual", False)
    layer = (side_by_side if at_once else pre_norm)(norm, mixer, gated(hf_config))
    names = Names(q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}")
    return decoder(hf_config, layer, norm, names=names)


def nemotron(hf_config: HfConfig) -> DecoderSpec:
    """Nemotron 3 and 4, Minitron: layer norms with offset 1, squared ReLU without gates, half of each head rotated."""
    norm = layer_norm(hf_config, offset=1.0)
    mixer = attention(hf_config, positions=4096, share=0.5, bias_key="attention_bias")
    mlp = plain(hf_config, "relu2", biased=hf_config.flag("mlp_bias", False))
    return pre_norm_decoder(hf_config, norm, mixer, mlp)


def minicpm(hf_config: HfConfig) -> DecoderSpec:
    """MiniCPM 1, 2 and 4: Granite's factors, derived from a smaller model's width."""
    hidden, layers, norm = hidden_size(hf_config), num_layers(hf_config), rms(hf_config, 1e-5)
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias")
    residual = factor(hf_config, "scale_depth") / layers**0.5
    layer = pre_norm(norm, mixer, gated(hf_config), residual_multiplier=residual)
    return decoder(
        hf_config,
        layer,
        norm,
        usually_tied=True,
        embedding_scale=factor(hf_config, "scale_emb"),
        logit_scale=hf_config.whole("dim_model_base", 1, MAX_WIDTH, hidden) / hidden,
    )


def orion(hf_config: HfConfig) -> DecoderSpec:
    """Orion: layer norms."""
    norm = NormSpec(kind=NormKind.LAYER, eps=rms(hf_config, 1e-5).eps, biased=True)
    return pre_norm_decoder(hf_config, norm, attention(hf_config, positions=4096), gated(hf_config))


def jais2(hf_config: HfConfig) -> DecoderSpec:
    """Jais 2: layer norms, squared ReLU without gates, biases."""
    mixer = attention(hf_config, positions=8192, biased=hf_config.flag("attention_bias", True))
    mlp = plain(hf_config, "relu2", biased=hf_config.flag("mlp_bias", True))
    return pre_norm_decoder(hf_config, layer_norm(hf_config), mixer, mlp)


def cwm(hf_config: HfConfig) -> DecoderSpec:
    """Code World Model: sliding windows except in every fourth layer, starting with the first."""
    mixer = attention(hf_config, positions=131072, kv_heads=8, head_dim=128, theta=1e6)
    norm, usual = rms(hf_config, 1e-5), [SLIDING if i % 4 else FULL for i in range(num_layers(hf_config))]
    windows = windows_by_kind(hf_config, window(hf_config, 8192), usual)
    return decoder(hf_config, windowed(pre_norm(norm, mixer, biased_gated(hf_config)), windows), norm)


def rotated_layers(hf_config: HfConfig) -> list[bool]:
    """Return whether each layer has rotation.

    ``no_rope_layers`` has a 0 for each layer without. If the list is absent or empty, the last of every
    ``no_rope_layer_interval`` layers has none.
    """
    count, flags = num_layers(hf_config), hf_config.values.get("no_rope_layers")
    if flags is None or flags == []:
        interval = hf_config.whole("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(flags, list) or len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise hf_config.wrong("no_rope_layers", f"a list of {count} numbers, each 0 (not rotated) or 1")
    return [bool(flag) for flag in flags[:count]]


def smollm3(hf_config: HfConfig) -> DecoderSpec:
    """SmolLM 3: every fourth layer has no rotation."""
    norm = rms(hf_config)
    mixer = attention(hf_config, positions=32768, kv_heads=4, theta=2e6, bias_key="attention_bias")
    rotated = rotated_layers(hf_config)
    width = window(hf_config) if hf_config.flag("use_sliding_window", False) else None
    windows = windows_by_kind(hf_config, width, [FULL if has_rope else SLIDING for has_rope in rotated])
    mlp = biased_gated(hf_config)
    layers = [pre_norm(norm, mixer if has_rope else replace(mixer, rope=None), mlp) for has_rope in rotated]
    return decoder(hf_config, windowed(layers, windows), norm, usually_tied=True)


def ernie(hf_config: HfConfig) -> DecoderSpec:
    """ERNIE 4.5, dense: interleaved rotation."""
    biased = hf_config.flag("use_bias", False)
    mixer = attention(
        hf_config,
        positions=131072,
        kv_heads=2,
        head_dim=128,
        theta=500000.0,
        interleaved=True,
        biased=biased,
    )
    mlp = gated(hf_config, biased=biased)
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, mlp, usually_tied=True)


def ministral(hf_config: HfConfig) -> DecoderSpec:
    """Ministral: some layers have a sliding window."""
    width, norm = window(hf_config, 4096), rms(hf_config)
    mixer = attention(hf_config, positions=131072, kv_heads=8)
    windows = windows_by_kind(hf_config, width, [SLIDING] * num_layers(hf_config))
    return decoder(hf_config, windowed(pre_norm(norm, mixer, gated(hf_config)), windows), norm)


def ministral3(hf_config: HfConfig) -> DecoderSpec:
    """Ministral 3: queries are scaled beyond the context length of pretraining."""
    mixer = attention(
        hf_config, positions=262144, kv_heads=8, head_dim=128, theta=1e6, window=window(hf_config)
    )
    growth = hf_config.section("rope_parameters").real("llama_4_scaling_beta", 0.0, 1e3, 0.0)
    if growth and mixer.rope is not None:
        mixer = replace(mixer, temperature=Temperature(growth, mixer.rope.original_positions))
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, gated(hf_config))


def internlm3(hf_config: HfConfig) -> DecoderSpec:
    """InternLM 3."""
    biased = hf_config.flag(("qkv_bias", "attention_bias"), False)
    mlp_biased = hf_config.flag(("bias", "mlp_bias"), False)
    mixer = attention(
        hf_config, positions=32768, kv_heads=2, head_dim=128, qkv_bias=biased, output_bias=mlp_biased
    )
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, gated(hf_config, biased=mlp_biased))


def seed_oss(hf_config: HfConfig) -> DecoderSpec:
    """Seed-OSS."""
    mixer = attention(
        hf_config,
        positions=524288,
        kv_heads=8,
        head_dim=128,
        qkv_bias=hf_config.flag("attention_bias", True),
        output_bias=hf_config.flag("attention_out_bias", False),
    )
    return pre_norm_decoder(hf_config, rms(hf_config), mixer, biased_gated(hf_config))


def helium(hf_config: HfConfig) -> DecoderSpec:
    """Helium: interleaved rotation."""
    biased = hf_config.flag("attention_bias", False)
    mixer = attention(
        hf_config, positions=4096, head_dim=128, theta=100000.0, interleaved=True, qkv_bias=biased
    )
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-8, rounds_once=True), mixer, biased_gated(hf_config))


def arcee(hf_config: HfConfig) -> DecoderSpec:
    """AFM: squared ReLU without gates."""
    mixer = attention(hf_config, positions=4096, bias_key="attention_bias")
    mlp = plain(hf_config, "relu2", biased=hf_config.flag("mlp_bias", False))
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, mlp)


CURVES = "xielu_curves"
"""Key of configs converted from GGUF: activation parameters, which are tensors in other checkpoints."""
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus(hf_config: HfConfig) -> DecoderSpec:
    """Apertus: norms of queries and keys, a learned activation."""
    hf_config.word(ACTIVATION, ("xielu",), "xielu")
    if not hf_config.has("rope_parameters") and not hf_config.has("rope_scaling"):
        hf_config = replace(hf_config, values={**hf_config.values, "rope_parameters": _APERTUS_ROPE})
    norm = rms(hf_config, 1e-5)
    mixer = attention(hf_config, positions=65536, theta=12e6, qk_norm=norm, bias_key="attention_bias")
    mlp = MlpSpec(width=hf_config.whole(WIDTH, 1, MAX_WIDTH), activation=LearnedActivation.XIELU, gated=False)
    curves = _curves(hf_config)
    layers = tuple(pre_norm(norm, mixer, replace(mlp, curve=curve)) for curve in curves)
    return decoder(
        hf_config,
        layers,
        norm,
        names=Names(mixer_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    )


def _curves(hf_config: HfConfig) -> list[tuple[float, float, float, float] | None]:
    """Return each layer's activation parameters from a converted GGUF config; None for other configs."""
    count = num_layers(hf_config)
    if not hf_config.has(CURVES):
        return [None] * count
    section = hf_config.section(CURVES)
    p, n, beta, eps = (
        section.reals(key, count, -1e4, 1e4, "layer") for key in ("alpha_p", "alpha_n", "beta", "eps")
    )
    return list(zip(p, n, beta, eps, strict=True))


def phi3(hf_config: HfConfig) -> DecoderSpec:
    """Phi 3 and 4: Llama with stacked tensors."""
    norm = rms(hf_config, 1e-5)
    mixer = attention(hf_config, positions=4096, window=window(hf_config), layout=QkvLayout.STACKED)
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config, layout=MlpLayout.STACKED))


FAMILIES = {
    "LlamaForCausalLM": Family(llama, "Llama 1, 2 and 3, CodeLlama, Vicuna"),
    "LLaMAForCausalLM": Family(llama, "first conversions of Llama 1"),
    "MistralForCausalLM": Family(mistral, "Mistral 7B"),
    "Qwen2ForCausalLM": Family(qwen2, "Qwen 2 and 2.5"),
    "MiMoForCausalLM": Family(mimo, "MiMo 7B"),
    "BitNetForCausalLM": Family(bitnet, "BitNet b1.58"),
    "Qwen3ForCausalLM": Family(qwen3, "Qwen 3"),
    "GraniteForCausalLM": Family(granite, "Granite 3, dense"),
    "HyperCLOVAXForCausalLM": Family(hyperclovax, "HyperCLOVA X SEED Think"),
    "Jais2ForCausalLM": Family(jais2, "Jais 2"),
    "CwmForCausalLM": Family(cwm, "Code World Model"),
    "MiniCPMForCausalLM": Family(minicpm, "MiniCPM 1, 2 and 4"),
    "OrionForCausalLM": Family(orion, "Orion"),
    "XverseForCausalLM": Family(llama, "XVERSE"),
    "StableLmForCausalLM": Family(stablelm, "StableLM"),
    "StableLMEpochForCausalLM": Family(stablelm, "StableLM, by its own code"),
    "NemotronForCausalLM": Family(nemotron, "Nemotron 3 and 4, Minitron"),
    "SmolLM3ForCausalLM": Family(smollm3, "SmolLM 3"),
    "Ernie4_5ForCausalLM": Family(ernie, "ERNIE 4.5, dense"),
    "Ernie4_5_ForCausalLM": Family(ernie, "ERNIE 4.5, dense, first configs"),
    "MinistralForCausalLM": Family(ministral, "Ministral 8B"),
    "Ministral3ForCausalLM": Family(ministral3, "Ministral 3"),
    "InternLM3ForCausalLM": Family(internlm3, "InternLM 3"),
    "SeedOssForCausalLM": Family(seed_oss, "Seed-OSS"),
    "HeliumForCausalLM": Family(helium, "Helium"),
    "ApertusForCausalLM": Family(apertus, "Apertus"),
    "ArceeForCausalLM": Family(arcee, "AFM"),
    "Phi3ForCausalLM": Family(phi3, "Phi 3, 3.5 and 4"),
}
