"""DeepSeek, and models with its latent attention or its routing (sigmoid scores with a correction)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.experts import MAX_CHOSEN, MAX_EXPERTS, ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import (
    EXPERTS,
    MIXTRAL_NAMES,
    SHARED,
    dense_then,
    expert_width,
    first_dense,
    routing,
    softmax_experts,
)
from quintet.executor.model_config.families.post_norm import exaone_mixers
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import RopeSpec, rope_spec
from quintet.executor.model_config.shape import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    Family,
    attention,
    decoder,
    gated,
    head_width,
    hidden_size,
    last_sliding,
    num_heads,
    num_layers,
    pre_norm,
    pre_norm_decoder,
    rms,
    rotated_numbers,
    window,
    windowed,
    windows_by_kind,
)
from quintet.executor.model_config.spec import (
    DecoderSpec,
    LatentSpec,
    NormKind,
    NormSpec,
    QkNormOver,
    QkvLayout,
)

_BAILING_NAMES = Names(
    embedding="model.word_embeddings",
    qkv="attention.query_key_value",
    output="attention.dense",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    correction="mlp.gate.expert_bias",
)
LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, for any config."""


def grouped(
    hf_config: HfConfig, groups: int, chosen_groups: int, best: int, experts: int, chosen: int
) -> dict[str, Any]:
    """Return the `Routing` fields of group-limited selection; the arguments are the family's defaults."""
    count = hf_config.whole(EXPERTS, 1, MAX_EXPERTS, experts)
    groups = hf_config.whole("n_group", 1, count, groups)
    if count % groups or count // groups < best:
        raise hf_config.wrong(
            "n_group", f"a number that divides {count} experts into groups of at least {best}"
        )
    kept = hf_config.whole("topk_group", 1, groups, chosen_groups)
    if hf_config.whole("num_experts_per_tok", 1, MAX_CHOSEN, chosen) > kept * (count // groups):
        raise hf_config.wrong(
            "num_experts_per_tok", f"at most the {kept * (count // groups)} experts of {kept} groups"
        )
    return {"groups": groups, "chosen_groups": kept, "group_best": best} if groups > 1 else {}


def sigmoid_experts(
    hf_config: HfConfig,
    *,
    experts: int,
    chosen: int,
    width: int,
    groups: int = 1,
    chosen_groups: int = 1,
    scale: float = 1.0,
    renormalise: bool = True,
    shared: int = 1,
) -> ExpertsSpec:
    """Return experts with DeepSeek V3's routing, shared ones included; the arguments are the family's defaults."""
    width = expert_width(hf_config, default=width)
    choice = routing(
        *(hf_config, Scoring.SIGMOID, experts, chosen),
        renormalise=hf_config.flag("norm_topk_prob", renormalise),
        scale=hf_config.real("routed_scaling_factor", 1e-9, 1e9, scale),
        **grouped(hf_config, groups, chosen_groups, 2, experts, chosen),
    )
    shared = hf_config.whole(SHARED, 0, MAX_EXPERTS, shared)
    return ExpertsSpec(routing=choice, width=width, corrected=True, shared_width=shared * width or None)


def deepseek(hf_config: HfConfig) -> DecoderSpec:
    """DeepSeekMoE 16B: Llama's attention, softmax over many small experts, shared experts."""
    norm = rms(hf_config)
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias")
    experts = softmax_experts(hf_config, width=1407)
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 0), norm)


def bailing(hf_config: HfConfig) -> DecoderSpec:
    """Ling and Ling-lite 1.5: as DeepSeekMoE, with other tensor names and stacked queries, keys and values."""
    norm, biased = rms(hf_config), hf_config.flag("use_qkv_bias", False)
    mixer = attention(
        *(hf_config,),
        positions=16384,
        kv_heads=4,
        theta=600000.0,
        qkv_bias=biased,
        output_bias=hf_config.flag("use_bias", False),
        layout=QkvLayout.STACKED,
    )
    experts = softmax_experts(hf_config, width=1408)
    head = hf_config.flag("norm_head", False)
    return decoder(
        hf_config,
        first_dense(hf_config, norm, mixer, experts, 0),
        norm,
        names=_BAILING_NAMES,
        normalised_head=head,
    )


def latent(
    hf_config: HfConfig,
    positions: int,
    rank: int,
    q_rank: int,
    plain: int,
    rope: int,
    width: int,
    interleaved: bool,
) -> LatentSpec:
    """Return multi-head latent attention; the arguments are the family's defaults."""
    rope_dim = hf_config.whole("qk_rope_head_dim", 2, MAX_HEAD_DIM, rope)
    plain_dim = hf_config.whole("qk_nope_head_dim", 1, MAX_HEAD_DIM, plain)
    rotation = rope_spec(hf_config, rope_dim, positions)
    at_once = "q_lora_rank" in hf_config.values and not hf_config.has("q_lora_rank")  # null
    biased = hf_config.flag("attention_bias", False)
    if at_once and biased:
        raise hf_config.wrong("attention_bias", "false if q_lora_rank is null")
    return LatentSpec(
        num_heads=num_heads(hf_config),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        head_width=hf_config.whole("v_head_dim", 1, MAX_HEAD_DIM, width),
        rank=hf_config.whole("kv_lora_rank", 1, MAX_HEAD_DIM, rank),
        q_rank=None if at_once else hf_config.whole("q_lora_rank", 1, MAX_WIDTH, q_rank),
        scale=(plain_dim + rope_dim) ** -0.5 * _yarn_scale(rotation) ** 2,
        rope=rotation,
        interleaved=interleaved,
        norm=NormSpec(kind=NormKind.RMS, eps=LATENT_EPS),
        biased=biased,
    )


def deepseek_v2(hf_config: HfConfig) -> DecoderSpec:
    """DeepSeek V2 and V2-Lite: softmax over all experts, limited to some groups."""
    norm, width = rms(hf_config), expert_width(hf_config, default=1407)
    limits = {}
    if hf_config.word("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy":
        limits = grouped(hf_config, 1, 1, 1, 64, 6)
    scale = hf_config.real("routed_scaling_factor", 1e-9, 1e9, 1.0)
    shared = hf_config.whole("n_shared_experts", 0, MAX_EXPERTS, 2)
    experts = ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX, 64, 6, scale=scale, **limits),
        width=width,
        shared_width=shared * width or None,
    )
    mixer = latent(hf_config, 2048, 512, 1536, 128, 64, 128, interleaved=True)
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 0), norm)


def deepseek_v3(hf_config: HfConfig) -> DecoderSpec:
    """DeepSeek V3, R1 and Kimi K2: sigmoid scores with a correction; a group counts by its two best experts."""
    norm = rms(hf_config)
    mixer = latent(hf_config, 4096, 512, 1536, 128, 64, 128, hf_config.flag("rope_interleave", True))
    experts = sigmoid_experts(
        hf_config, experts=256, chosen=8, groups=8, chosen_groups=4, scale=2.5, width=2048
    )
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 3), norm, predictors=1)


def glm4_lite(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek V3's layers with wider heads and without groups."""
    norm = rms(hf_config, 1e-5)
    mixer = latent(hf_config, 202752, 512, 768, 192, 64, 256, hf_config.flag("rope_interleave", True))
    experts = sigmoid_experts(hf_config, experts=64, chosen=4, width=1536, scale=1.8)
    return decoder(hf_config, first_dense(hf_config, norm, mixer, experts, 1), norm, predictors=1)


def youtu(hf_config: HfConfig) -> DecoderSpec:
    """Youtu-LLM: DeepSeek V3's attention, no experts."""
    norm = rms(hf_config)
    mixer = latent(hf_config, 131072, 512, 1536, 128, 64, 128, hf_config.flag("rope_interleave", True))
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config), usually_tied=True)


def minicpm3(hf_config: HfConfig) -> DecoderSpec:
    """MiniCPM 3: multipliers of embedding, residual and logits."""
    norm, hidden, layers = rms(hf_config, 1e-5), hidden_size(hf_config), num_layers(hf_config)
    mixer = latent(hf_config, 32768, 256, 768, 64, 32, hidden // num_heads(hf_config), interleaved=False)
    depth = hf_config.real("scale_depth", 1e-9, 1e9, 1.4) / math.sqrt(layers)
    layer = pre_norm(norm, mixer, gated(hf_config), residual_multiplier=depth)
    return decoder(
        *(hf_config, layer, norm),
        usually_tied=True,
        embedding_scale=hf_config.real("scale_emb", 1e-9, 1e9, 12.0),
        logit_scale=hf_config.whole("dim_model_base", 1, MAX_WIDTH, 256) / hidden,
    )


def _yarn_scale(rope: RopeSpec) -> float:
    """Return the factor of queries and of keys for a YaRN-scaled rotation; 1 otherwise."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1.0:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


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
    layers = first_dense(hf_config, norm, mixer, experts, 0)
    windows = windows_by_kind(hf_config, window(hf_config, 4096), last_sliding(hf_config, 62))
    return decoder(hf_config, windowed(layers, windows), norm)


def exaone(hf_config: HfConfig) -> DecoderSpec:
    """K-EXAONE: EXAONE 4's attention, norms before blocks, experts in all but the first layer."""
    limits = hf_config.values.get("swiglu_limits")
    if limits is not None and (not isinstance(limits, list) or any(limits)):
        raise hf_config.wrong(
            "swiglu_limits", "zeros: limits of gates, as in K-EXAONE 2.0, are not supported"
        )
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
    return pre_norm_decoder(hf_config, norm, mixer, experts, names=names)


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
    return decoder(hf_config, layers, norm, predictors=1, names=_BAILING_NAMES)


FAMILIES = {
    "DeepseekForCausalLM": Family(deepseek, "DeepSeekMoE 16B"),
    "BailingMoeForCausalLM": Family(bailing, "Ling 1 and 1.5"),
    "DeepseekV2ForCausalLM": Family(deepseek_v2, "DeepSeek V2 and V2-Lite"),
    "DeepseekV3ForCausalLM": Family(deepseek_v3, "DeepSeek V3 and R1"),
    "Glm4MoeLiteForCausalLM": Family(glm4_lite, "GLM-4.7-Flash"),
    "YoutuForCausalLM": Family(youtu, "Youtu-LLM 2B"),
    "MiniCPM3ForCausalLM": Family(minicpm3, "MiniCPM 3"),
    "Glm4MoeForCausalLM": Family(glm4, "GLM-4.5 and 4.6"),
    "SolarOpenForCausalLM": Family(solar_open, "Solar Open 100B"),
    "Dots1ForCausalLM": Family(dots1, "dots.llm1"),
    "ExaoneMoeForCausalLM": Family(exaone, "K-EXAONE 236B A23B"),
    "MiniMaxM2ForCausalLM": Family(minimax_m2, "MiniMax M2"),
    "BailingMoeV2ForCausalLM": Family(bailing2, "Ling 2 and Ring 2"),
}
