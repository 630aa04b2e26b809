"""Models with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, Youtu-LLM, MiniCPM 3."""

from __future__ import annotations

import math

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import MAX_EXPERTS, ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import (
    expert_width,
    first_dense,
    grouped,
    routing,
    sigmoid_experts,
)
from quintet.executor.model_config.family import Family
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
"""Epsilon of the latents' norms, for any card."""


def latent(
    card: ModelCard,
    positions: int,
    rank: int,
    q_rank: int,
    plain: int,
    rope: int,
    width: int,
    interleaved: bool,
) -> LatentSpec:
    """Return multi-head latent attention; the arguments are the family's defaults."""
    rope_dim = card.whole("qk_rope_head_dim", 2, MAX_HEAD_DIM, rope)
    plain_dim = card.whole("qk_nope_head_dim", 1, MAX_HEAD_DIM, plain)
    rotation = rope_spec(card, rope_dim, positions)
    at_once = "q_lora_rank" in card.values and not card.has("q_lora_rank")  # null
    biased = card.flag("attention_bias", False)
    if at_once and biased:
        raise card.wrong("attention_bias", "false if q_lora_rank is null")
    return LatentSpec(
        num_heads=num_heads(card),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        head_width=card.whole("v_head_dim", 1, MAX_HEAD_DIM, width),
        rank=card.whole("kv_lora_rank", 1, MAX_HEAD_DIM, rank),
        q_rank=None if at_once else card.whole("q_lora_rank", 1, MAX_WIDTH, q_rank),
        scale=(plain_dim + rope_dim) ** -0.5 * _yarn_scale(rotation) ** 2,
        rope=rotation,
        interleaved=interleaved,
        norm=NormSpec(kind=NormKind.RMS, eps=LATENT_EPS),
        biased=biased,
    )


def deepseek_v2(card: ModelCard) -> DecoderSpec:
    """DeepSeek V2 and V2-Lite: softmax over all experts, limited to some groups."""
    norm, width = rms(card), expert_width(card, default=1407)
    limits = {}
    if card.word("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy":
        limits = grouped(card, 1, 1, 1, 64, 6)
    scale = card.real("routed_scaling_factor", 1e-9, 1e9, 1.0)
    shared = card.whole("n_shared_experts", 0, MAX_EXPERTS, 2)
    experts = ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX, 64, 6, scale=scale, **limits),
        width=width,
        shared_width=shared * width or None,
    )
    mixer = latent(card, 2048, 512, 1536, 128, 64, 128, interleaved=True)
    return decoder(card, first_dense(card, norm, mixer, experts, 0), norm)


def deepseek_v3(card: ModelCard) -> DecoderSpec:
    """DeepSeek V3, R1 and Kimi K2: sigmoid scores with a correction; a group counts by its two best experts."""
    norm = rms(card)
    mixer = latent(card, 4096, 512, 1536, 128, 64, 128, card.flag("rope_interleave", True))
    experts = sigmoid_experts(card, experts=256, chosen=8, groups=8, chosen_groups=4, scale=2.5, width=2048)
    return decoder(card, first_dense(card, norm, mixer, experts, 3), norm, predictors=1)


def glm4_lite(card: ModelCard) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek V3's layers with wider heads and without groups."""
    norm = rms(card, 1e-5)
    mixer = latent(card, 202752, 512, 768, 192, 64, 256, card.flag("rope_interleave", True))
    experts = sigmoid_experts(card, experts=64, chosen=4, width=1536, scale=1.8)
    return decoder(card, first_dense(card, norm, mixer, experts, 1), norm, predictors=1)


def youtu(card: ModelCard) -> DecoderSpec:
    """Youtu-LLM: DeepSeek V3's attention, no experts."""
    norm = rms(card)
    mixer = latent(card, 131072, 512, 1536, 128, 64, 128, card.flag("rope_interleave", True))
    layers, tied = (
        (pre_norm(norm, mixer, gated(card)),) * num_layers(card),
        card.flag("tie_word_embeddings", True),
    )
    return decoder(card, layers, norm, tied=tied)


def minicpm3(card: ModelCard) -> DecoderSpec:
    """MiniCPM 3: multipliers of embedding, residual and logits."""
    norm, hidden, layers = rms(card, 1e-5), hidden_size(card), num_layers(card)
    mixer = latent(card, 32768, 256, 768, 64, 32, hidden // num_heads(card), interleaved=False)
    depth = card.real("scale_depth", 1e-9, 1e9, 1.4) / math.sqrt(layers)
    layer = pre_norm(norm, mixer, gated(card), residual_multiplier=depth)
    return decoder(
        *(card, (layer,) * layers, norm),
        tied=card.flag("tie_word_embeddings", True),
        embedding_scale=card.real("scale_emb", 1e-9, 1e9, 12.0),
        logit_scale=card.whole("dim_model_base", 1, MAX_WIDTH, 256) / hidden,
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
