"""Mixture-of-experts models with DeepSeek V3's routing (sigmoid scores with a correction) and usual attention."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import (
    BAILING_NAMES,
    MIXTRAL_NAMES,
    dense_then,
    expert_width,
    first_dense,
    routing,
    sigmoid_experts,
)
from quintet.executor.model_config.families.olmo import exaone_mixers
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    attention,
    decoder,
    head_width,
    layer_kinds,
    num_layers,
    pre_norm,
    rms,
    rotated_numbers,
    window,
    windowed,
)
from quintet.executor.model_config.spec import DecoderSpec, QkNormOver, QkvLayout


def glm4(card: ModelCard) -> DecoderSpec:
    """GLM-4.5 and 4.6: no experts in the first layers, half of each head rotated."""
    norm = rms(card, 1e-5)
    mixer = attention(
        *(card,),
        positions=131072,
        share=0.5,
        kv_heads=8,
        qk_norm=norm if card.flag("use_qk_norm", False) else None,
        qkv_bias=card.flag("attention_bias", False),
    )
    experts = sigmoid_experts(card, experts=128, chosen=8, width=1408)
    return decoder(card, first_dense(card, norm, mixer, experts, 1), norm, predictors=1)


def solar_open(card: ModelCard) -> DecoderSpec:
    """Solar Open: experts in all layers."""
    norm, biased = rms(card, 1e-5), card.flag("attention_bias", False)
    mixer = attention(card, positions=131072, kv_heads=8, head_dim=128, theta=1e6, qkv_bias=biased)
    experts = sigmoid_experts(card, experts=128, chosen=8, width=1280)
    return decoder(card, first_dense(card, norm, mixer, experts, 0), norm)


def dots1(card: ModelCard) -> DecoderSpec:
    """dots.llm1: norms of queries and keys; sliding windows, if any, in the last layers."""
    norm, biased = rms(card), card.flag("attention_bias", False)
    mixer = attention(card, positions=2048, qk_norm=norm, qkv_bias=biased, output_bias=biased)
    experts = sigmoid_experts(card, experts=128, chosen=6, width=1408, renormalise=False, shared=0)
    first, width = card.whole("max_window_layers", 0, MAX_LAYERS, 62), window(card, 4096)
    usual = [SLIDING if width and layer >= first else FULL for layer in range(num_layers(card))]
    windows = (width if kind == SLIDING else None for kind in layer_kinds(card, usual))
    layers = [
        windowed(layer, (each,))[0]
        for layer, each in zip(first_dense(card, norm, mixer, experts, 0), windows, strict=True)
    ]
    return decoder(card, layers, norm)


def exaone(card: ModelCard) -> DecoderSpec:
    """K-EXAONE: EXAONE 4's attention, norms before blocks, experts in all but the first layer."""
    norm = rms(card, 1e-5)
    experts = sigmoid_experts(card, experts=64, chosen=8, width=1024, scale=2.5)
    mlps = dense_then(card, experts, 1)
    layers = [pre_norm(norm, mixer, mlp) for mixer, mlp in zip(exaone_mixers(card), mlps, strict=True)]
    names = Names(correction="mlp.e_score_correction_bias", ignored=("mtp.*",))
    return decoder(card, layers, norm, names=names)


def minimax_m2(card: ModelCard) -> DecoderSpec:
    """MiniMax M2: queries and keys normed over all heads, partial rotation, Mixtral's expert names."""
    norm, dim = rms(card), head_width(card, 128)
    rope = rope_spec(card, dim, 196608, theta=5e6, rotary_dim=rotated_numbers(card, dim))
    mixer = attention(card, kv_heads=8, head_dim=dim, rope=rope, qk_norm=norm, qk_norm_over=QkNormOver.WHOLE)
    choice = routing(card, Scoring.SIGMOID, 256, 8, renormalise=True)
    experts = ExpertsSpec(routing=choice, width=expert_width(card, "intermediate_size"), corrected=True)
    names = replace(
        MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias", ignored=("model.mtp*",)
    )
    return decoder(card, (pre_norm(norm, mixer, experts),) * num_layers(card), norm, names=names)


def bailing2(card: ModelCard) -> DecoderSpec:
    """Ling 2 and Ring 2: norms of queries and keys, half of each head rotated, other tensor names."""
    norm, biased = rms(card), card.flag("use_qkv_bias", False)
    mixer = attention(
        *(card,),
        positions=32768,
        share=0.5,
        kv_heads=4,
        head_dim=128,
        theta=600000.0,
        qk_norm=norm if card.flag("use_qk_norm", True) else None,
        qkv_bias=biased,
        output_bias=card.flag("use_bias", False),
        layout=QkvLayout.STACKED,
    )
    experts = sigmoid_experts(
        card, experts=256, chosen=8, width=512, groups=8, chosen_groups=4, scale=2.5, shared=1
    )
    layers = first_dense(card, norm, mixer, experts, 1)
    return decoder(card, layers, norm, predictors=1, names=BAILING_NAMES)


FAMILIES = {
    "Glm4MoeForCausalLM": Family(glm4, "GLM-4.5 and 4.6"),
    "SolarOpenForCausalLM": Family(solar_open, "Solar Open 100B"),
    "Dots1ForCausalLM": Family(dots1, "dots.llm1"),
    "ExaoneMoeForCausalLM": Family(exaone, "K-EXAONE 236B A23B"),
    "MiniMaxM2ForCausalLM": Family(minimax_m2, "MiniMax M2"),
    "BailingMoeV2ForCausalLM": Family(bailing2, "Ling 2 and Ring 2"),
}
