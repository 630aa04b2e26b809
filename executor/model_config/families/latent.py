"""Models with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, Youtu-LLM, MiniCPM 3."""

from __future__ import annotations

import math

from quintet.executor.model_config.experts import MAX_EXPERTS, ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import (
    expert_width,
    first_dense,
    grouped,
    routing,
    sigmoid_experts,
)
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.rope import RopeSpec, rope_spec
from quintet.executor.model_config.shape import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    decoder,
    gated,
    hidden_size,
    num_heads,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, LatentSpec, NormKind, NormSpec

LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, for any config."""


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
    tied = hf_config.flag("tie_word_embeddings", True)
    return decoder(hf_config, pre_norm(norm, mixer, gated(hf_config)), norm, tied=tied)


def minicpm3(hf_config: HfConfig) -> DecoderSpec:
    """MiniCPM 3: multipliers of embedding, residual and logits."""
    norm, hidden, layers = rms(hf_config, 1e-5), hidden_size(hf_config), num_layers(hf_config)
    mixer = latent(hf_config, 32768, 256, 768, 64, 32, hidden // num_heads(hf_config), interleaved=False)
    depth = hf_config.real("scale_depth", 1e-9, 1e9, 1.4) / math.sqrt(layers)
    layer = pre_norm(norm, mixer, gated(hf_config), residual_multiplier=depth)
    return decoder(
        *(hf_config, layer, norm),
        tied=hf_config.flag("tie_word_embeddings", True),
        embedding_scale=hf_config.real("scale_emb", 1e-9, 1e9, 12.0),
        logit_scale=hf_config.whole("dim_model_base", 1, MAX_WIDTH, 256) / hidden,
    )


def _yarn_scale(rope: RopeSpec) -> float:
    """Return the factor of queries and of keys for a YaRN-scaled rotation; 1 otherwise."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1.0:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


FAMILIES = {
    "DeepseekV2ForCausalLM": Family(deepseek_v2, "DeepSeek V2 and V2-Lite"),
    "DeepseekV3ForCausalLM": Family(deepseek_v3, "DeepSeek V3 and R1"),
    "Glm4MoeLiteForCausalLM": Family(glm4_lite, "GLM-4.7-Flash"),
    "YoutuForCausalLM": Family(youtu, "Youtu-LLM 2B"),
    "MiniCPM3ForCausalLM": Family(minicpm3, "MiniCPM 3"),
}
