"""Mixture-of-experts models with DeepSeek V3's routing (sigmoid scores with a correction) and usual attention."""

from __future__ import annotations

from dataclasses import replace

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
from quintet.executor.model_config.hf_config import HfConfig
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


def glm4(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4.5 and 4.6: no experts in the first layers, half of each head rotated."""
    norm = rms(hf_config, 1e-5)
    mixer = attention(
        *(hf_config,),
        positions=131072,
        share=0.5,
        kv_heads=8,
        qk_norm=norm if hf_config.flag("use_qk_norm", False) else None,
        qkv_bias=hf_config.flag("attention_bias", False),
    )
    experts = sigmoid_experts(hf_config, experts=128, chosen=8, width=1408)
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 1), norm, predictors=1)


def solar_open(hf_config: HfConfig) -> DecoderSpec:
    """Solar Open: experts in all layers."""
    norm, biased = rms(hf_config, 1e-5), hf_config.flag("attention_bias", False)
    mixer = attention(hf_config, positions=131072, kv_heads=8, head_dim=128, theta=1e6, qkv_bias=biased)
    experts = sigmoid_experts(hf_config, experts=128, chosen=8, width=1280)
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 0), norm)


def dots1(hf_config: HfConfig) -> DecoderSpec:
    """dots.llm1: norms of queries and keys; sliding windows, if any, in the last layers."""
    norm = rms(hf_config)
    mixer = attention(hf_config, positions=2048, qk_norm=norm, bias_key="attention_bias")
    experts = sigmoid_experts(hf_config, experts=128, chosen=6, width=1408, renormalise=False, shared=0)
    first, width = hf_config.whole("max_window_layers", 0, MAX_LAYERS, 62), window(hf_config, 4096)
    usual = [SLIDING if width and layer >= first else FULL for layer in range(num_layers(hf_config))]
    windows = (width if kind == SLIDING else None for kind in layer_kinds(hf_config, usual))
    layers = [
        windowed(layer, (each,))[0]
        for layer, each in zip(first_dense(hf_config, norm, mixer, experts, 0), windows, strict=True)
    ]
    return decoder(hf_config, layers, norm)


def exaone(hf_config: HfConfig) -> DecoderSpec:
    """K-EXAONE: EXAONE 4's attention, norms before blocks, experts in all but the first layer."""
    norm = rms(hf_config, 1e-5)
    experts = sigmoid_experts(hf_config, experts=64, chosen=8, width=1024, scale=2.5)
    mlps = dense_then(hf_config, experts, 1)
    layers = [pre_norm(norm, mixer, mlp) for mixer, mlp in zip(exaone_mixers(hf_config), mlps, strict=True)]
    names = Names(correction="mlp.e_score_correction_bias", ignored=("mtp.*",))
    return decoder(hf_config, layers, norm, names=names)


def minimax_m2(hf_config: HfConfig) -> DecoderSpec:
    """MiniMax M2: queries and keys normed over all heads, partial rotation, Mixtral's expert names."""
    norm, dim = rms(hf_config), head_width(hf_config, 128)
    rope = rope_spec(hf_config, dim, 196608, theta=5e6, rotary_dim=rotated_numbers(hf_config, dim))
    mixer = attention(
        hf_config, kv_heads=8, head_dim=dim, rope=rope, qk_norm=norm, qk_norm_over=QkNormOver.WHOLE
    )
    choice = routing(hf_config, Scoring.SIGMOID, 256, 8, renormalise=True)
    experts = ExpertsSpec(routing=choice, width=expert_width(hf_config, "intermediate_size"), corrected=True)
    names = replace(
        MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias", ignored=("model.mtp*",)
    )
    return decoder(hf_config, pre_norm(norm, mixer, experts), norm, names=names)


def bailing2(hf_config: HfConfig) -> DecoderSpec:
    """Ling 2 and Ring 2: norms of queries and keys, half of each head rotated, other tensor names."""
    norm, biased = rms(hf_config), hf_config.flag("use_qkv_bias", False)
    mixer = attention(
        *(hf_config,),
        positions=32768,
        share=0.5,
        kv_heads=4,
        head_dim=128,
        theta=600000.0,
        qk_norm=norm if hf_config.flag("use_qk_norm", True) else None,
        qkv_bias=biased,
        output_bias=hf_config.flag("use_bias", False),
        layout=QkvLayout.STACKED,
    )
    experts = sigmoid_experts(
        hf_config, experts=256, chosen=8, width=512, groups=8, chosen_groups=4, scale=2.5, shared=1
    )
    layers = first_dense(hf_config, norm, mixer, experts, 1)
    return decoder(hf_config, layers, norm, predictors=1, names=BAILING_NAMES)


FAMILIES = {
    "Glm4MoeForCausalLM": Family(glm4, "GLM-4.5 and 4.6"),
    "SolarOpenForCausalLM": Family(solar_open, "Solar Open 100B"),
    "Dots1ForCausalLM": Family(dots1, "dots.llm1"),
    "ExaoneMoeForCausalLM": Family(exaone, "K-EXAONE 236B A23B"),
    "MiniMaxM2ForCausalLM": Family(minimax_m2, "MiniMax M2"),
    "BailingMoeV2ForCausalLM": Family(bailing2, "Ling 2 and Ring 2"),
}
