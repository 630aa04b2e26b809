"""Decoders with Llama's tensor names that differ from Llama in one or two settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.families.llama import llama
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    ACTIVATION,
    FULL,
    MAX_WIDTH,
    SLIDING,
    WIDTH,
    attention,
    decoder,
    factor,
    gated,
    head_width,
    hidden_size,
    layer_kinds,
    layer_norm,
    num_layers,
    plain,
    pre_norm,
    rms,
    rotated_layers,
    side_by_side,
    window,
    windowed,
)
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LearnedActivation,
    MlpSpec,
    NormKind,
    Norms,
    NormSpec,
    QkNormOver,
    Temperature,
)


def granite(card: ModelCard) -> DecoderSpec:
    """Granite 3: factors of embeddings, scores, residuals and logits."""
    norms = Norms(before=rms(card))
    return _multiplied(card, _multiplied_attention(card, 1.0), norms, 1 / factor(card, "logits_scaling"))


def hyperclovax(card: ModelCard) -> DecoderSpec:
    """HyperCLOVA X: Granite's factors, and norms after the blocks as well."""
    norm, has_post_norm = rms(card), card.flag("use_post_norm", True)
    norms, names = (
        Norms(before=norm, after=norm if has_post_norm else None),
        Names(mixer_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    )
    mixer = _multiplied_attention(card, head_width(card) ** -0.5)
    return replace(_multiplied(card, mixer, norms, factor(card, "logits_scaling")), names=names)


def _multiplied_attention(card: ModelCard, scale: float) -> AttentionSpec:
    biased, scale = card.flag("attention_bias", False), factor(card, "attention_multiplier", scale)
    return attention(card, positions=2048, scale=scale, qkv_bias=biased, output_bias=biased)


def _multiplied(card: ModelCard, mixer: AttentionSpec, norms: Norms, logit_scale: float) -> DecoderSpec:
    layer = LayerSpec(
        mixer=mixer,
        mlp=gated(card, biased=card.flag("mlp_bias", False)),
        mixer_norms=norms,
        mlp_norms=norms,
        residual_multiplier=factor(card, "residual_multiplier"),
    )
    layers, scale = (layer,) * num_layers(card), factor(card, "embedding_multiplier")
    return decoder(card, layers, rms(card), embedding_scale=scale, logit_scale=logit_scale)


def stablelm(card: ModelCard) -> DecoderSpec:
    """StableLM: 1/4 of each head is rotated; 2-12B has norms of queries and keys, and parallel layers."""
    norm, normed = layer_norm(card), card.flag("qk_layernorm", False)
    mixer = attention(
        card,
        positions=4096,
        share=0.25,
        qkv_bias=card.flag("use_qkv_bias", False),
        qk_norm=replace(norm, biased=False) if normed else None,
        qk_norm_over=QkNormOver.OWN,
    )
    at_once = card.flag("use_parallel_residual", False)
    layer = (side_by_side if at_once else pre_norm)(norm, mixer, gated(card))
    names = Names(q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}")
    return decoder(card, (layer,) * num_layers(card), norm, names=names)


def nemotron(card: ModelCard) -> DecoderSpec:
    """Nemotron 3 and 4, Minitron: layer norms with offset 1, squared ReLU without gates, half of each head rotated."""
    biased, norm = card.flag("attention_bias", False), layer_norm(card, offset=1.0)
    mixer = attention(card, positions=4096, share=0.5, qkv_bias=biased, output_bias=biased)
    mlp = plain(card, "relu2", biased=card.flag("mlp_bias", False))
    return decoder(card, (pre_norm(norm, mixer, mlp),) * num_layers(card), norm)


def minicpm(card: ModelCard) -> DecoderSpec:
    """MiniCPM 1, 2 and 4: Granite's factors, derived from a smaller model's width."""
    hidden, layers, norm = hidden_size(card), num_layers(card), rms(card, 1e-5)
    biased = card.flag("attention_bias", False)
    layer = pre_norm(
        norm,
        attention(card, positions=2048, qkv_bias=biased, output_bias=biased),
        gated(card),
        residual_multiplier=factor(card, "scale_depth") / layers**0.5,
    )
    return decoder(
        card,
        (layer,) * layers,
        norm,
        tied=card.flag("tie_word_embeddings", True),
        embedding_scale=factor(card, "scale_emb"),
        logit_scale=card.whole("dim_model_base", 1, MAX_WIDTH, hidden) / hidden,
    )


def orion(card: ModelCard) -> DecoderSpec:
    """Orion: layer norms."""
    norm = NormSpec(kind=NormKind.LAYER, eps=rms(card, 1e-5).eps, biased=True)
    return _llama(card, attention(card, positions=4096), gated(card), norm)


def jais2(card: ModelCard) -> DecoderSpec:
    """Jais 2: layer norms, squared ReLU without gates, biases."""
    biased, norm = card.flag("attention_bias", True), layer_norm(card)
    mixer = attention(card, positions=8192, qkv_bias=biased, output_bias=biased)
    mlp = plain(card, "relu2", biased=card.flag("mlp_bias", True))
    return _llama(card, mixer, mlp, norm)


def cwm(card: ModelCard) -> DecoderSpec:
    """Code World Model: sliding windows except in every fourth layer, starting with the first."""
    mixer = attention(card, positions=131072, kv_heads=8, head_dim=128, theta=1e6)
    width, norm = window(card, 8192), rms(card, 1e-5)
    kinds = layer_kinds(card, [SLIDING if i % 4 else FULL for i in range(num_layers(card))])
    layer = pre_norm(norm, mixer, gated(card, biased=card.flag("mlp_bias", False)))
    return decoder(card, windowed(layer, (width if kind == SLIDING else None for kind in kinds)), norm)


def smollm3(card: ModelCard) -> DecoderSpec:
    """SmolLM 3: every fourth layer has no rotation."""
    biased, norm = card.flag("attention_bias", False), rms(card)
    mixer = attention(card, positions=32768, kv_heads=4, theta=2e6, qkv_bias=biased, output_bias=biased)
    rotated = rotated_layers(card)
    width = window(card) if card.flag("use_sliding_window", False) else None
    kinds = layer_kinds(card, [FULL if has_rope or not width else SLIDING for has_rope in rotated])
    mixers = (
        replace(mixer, rope=mixer.rope if has_rope else None, window=width if kind == SLIDING else None)
        for has_rope, kind in zip(rotated, kinds, strict=True)
    )
    mlp = gated(card, biased=card.flag("mlp_bias", False))
    layers = tuple(pre_norm(norm, each, mlp) for each in mixers)
    return decoder(card, layers, norm, tied=card.flag("tie_word_embeddings", True))


def ernie(card: ModelCard) -> DecoderSpec:
    """ERNIE 4.5, dense: interleaved rotation."""
    biased = card.flag("use_bias", False)
    mixer = attention(
        card,
        positions=131072,
        kv_heads=2,
        head_dim=128,
        theta=500000.0,
        interleaved=True,
        qkv_bias=biased,
        output_bias=biased,
    )
    tied = card.flag("tie_word_embeddings", True)
    return _llama(card, mixer, gated(card, biased=biased), rms(card, 1e-5), tied=tied)


def ministral(card: ModelCard) -> DecoderSpec:
    """Ministral: some layers have a sliding window."""
    width, norm = window(card, 4096), rms(card)
    mixer = attention(card, positions=131072, kv_heads=8)
    kinds = layer_kinds(card, [SLIDING if width else FULL] * num_layers(card))
    layers = windowed(
        pre_norm(norm, mixer, gated(card)), (width if kind == SLIDING else None for kind in kinds)
    )
    return decoder(card, layers, norm)


def ministral3(card: ModelCard) -> DecoderSpec:
    """Ministral 3: queries are scaled beyond the context length of pretraining."""
    mixer = attention(card, positions=262144, kv_heads=8, head_dim=128, theta=1e6, window=window(card))
    growth = card.section("rope_parameters").real("llama_4_scaling_beta", 0.0, 1e3, 0.0)
    if growth and mixer.rope is not None:
        mixer = replace(mixer, temperature=Temperature(growth, mixer.rope.original_positions))
    return _llama(card, mixer, gated(card), rms(card, 1e-5))


def internlm3(card: ModelCard) -> DecoderSpec:
    """InternLM 3."""
    biased, mlp_biased = (
        card.flag(("qkv_bias", "attention_bias"), False),
        card.flag(("bias", "mlp_bias"), False),
    )
    mixer = attention(
        card, positions=32768, kv_heads=2, head_dim=128, qkv_bias=biased, output_bias=mlp_biased
    )
    return _llama(card, mixer, gated(card, biased=mlp_biased), rms(card, 1e-5))


def seed_oss(card: ModelCard) -> DecoderSpec:
    """Seed-OSS."""
    mixer = attention(
        card,
        positions=524288,
        kv_heads=8,
        head_dim=128,
        qkv_bias=card.flag("attention_bias", True),
        output_bias=card.flag("attention_out_bias", False),
    )
    return _llama(card, mixer, gated(card, biased=card.flag("mlp_bias", False)), rms(card))


def helium(card: ModelCard) -> DecoderSpec:
    """Helium: interleaved rotation."""
    biased = card.flag("attention_bias", False)
    mixer = attention(card, positions=4096, head_dim=128, theta=100000.0, interleaved=True, qkv_bias=biased)
    return _llama(
        card, mixer, gated(card, biased=card.flag("mlp_bias", False)), rms(card, 1e-8, rounds_once=True)
    )


def arcee(card: ModelCard) -> DecoderSpec:
    """AFM: squared ReLU without gates."""
    biased = card.flag("attention_bias", False)
    mixer = attention(card, positions=4096, qkv_bias=biased, output_bias=biased)
    mlp = plain(card, "relu2", biased=card.flag("mlp_bias", False))
    return _llama(card, mixer, mlp, rms(card, 1e-5))


CURVES = "xielu_curves"
"""Key of cards converted from GGUF: activation parameters, which are tensors in other checkpoints."""
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus(card: ModelCard) -> DecoderSpec:
    """Apertus: norms of queries and keys, a learned activation."""
    card.word(ACTIVATION, ("xielu",), "xielu")
    if not card.has("rope_parameters") and not card.has("rope_scaling"):
        card = replace(card, values={**card.values, "rope_parameters": _APERTUS_ROPE})
    norm, biased = rms(card, 1e-5), card.flag("attention_bias", False)
    mixer = attention(card, positions=65536, theta=12e6, qk_norm=norm, qkv_bias=biased, output_bias=biased)
    mlp = MlpSpec(width=card.whole(WIDTH, 1, MAX_WIDTH), activation=LearnedActivation.XIELU, gated=False)
    curves = _curves(card)
    layers = tuple(pre_norm(norm, mixer, replace(mlp, curve=curve)) for curve in curves)
    return decoder(
        card, layers, norm, names=Names(mixer_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    )


def _curves(card: ModelCard) -> list[tuple[float, float, float, float] | None]:
    """Return each layer's activation parameters from a converted GGUF card; None for other cards."""
    count = num_layers(card)
    if not card.has(CURVES):
        return [None] * count
    section = card.section(CURVES)
    p, n, beta, eps = (section.reals(key, count, -1e4, 1e4) for key in ("alpha_p", "alpha_n", "beta", "eps"))
    return list(zip(p, n, beta, eps, strict=True))


def _llama(
    card: ModelCard, mixer: AttentionSpec, mlp: MlpSpec, norm: NormSpec, **switches: Any
) -> DecoderSpec:
    return decoder(card, (pre_norm(norm, mixer, mlp),) * num_layers(card), norm, **switches)


FAMILIES = {
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
    "Ernie4_5_ForCausalLM": Family(ernie, "ERNIE 4.5, dense, first cards"),
    "MinistralForCausalLM": Family(ministral, "Ministral 8B"),
    "Ministral3ForCausalLM": Family(ministral3, "Ministral 3"),
    "InternLM3ForCausalLM": Family(internlm3, "InternLM 3"),
    "SeedOssForCausalLM": Family(seed_oss, "Seed-OSS"),
    "HeliumForCausalLM": Family(helium, "Helium"),
    "ApertusForCausalLM": Family(apertus, "Apertus"),
    "ArceeForCausalLM": Family(arcee, "AFM"),
}
