"""Qwen3-Next and Qwen 3.5: the gated delta rule in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.mamba import MAX_STATE_SIZE, check_silu, taps
from quintet.executor.model_config.families.moe import QWEN_NAMES, expert_width, routing, sparse
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.shape import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    attention,
    decoder,
    gated,
    layer_types,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, FeedForwardSpec
from quintet.executor.model_config.state_specs import DeltaSpec

NAMES = replace(QWEN_NAMES, state_mixer="linear_attn", ignored=("mtp.*",))


def qwen3_next(card: ModelCard) -> DecoderSpec:
    """Qwen3-Next: experts with a gated shared expert, optionally not in all layers."""
    return _hybrid(card, sparse(card, _experts(card, 512, 10, card.flag("norm_topk_prob", True))), kv_heads=2)


def qwen3_5(card: ModelCard) -> DecoderSpec:
    """Qwen 3.5: dense feed-forwards."""
    return _hybrid(card, [gated(card)] * num_layers(card), kv_heads=4, by_head=False)


def qwen3_5_moe(card: ModelCard) -> DecoderSpec:
    """Qwen 3.5 MoE: experts in all layers."""
    return _hybrid(card, [_experts(card, 256, 8, True)] * num_layers(card), kv_heads=2, by_head=False)


def _hybrid(
    card: ModelCard, mlps: Sequence[FeedForwardSpec], kv_heads: int, by_head: bool = True
) -> DecoderSpec:
    """Build the decoder: 1/4 of each head is rotated, norms have offset 1."""
    norm, biased, count = rms(card, offset=1.0), card.flag("attention_bias", False), num_layers(card)
    attention_spec = attention(
        *(card,),
        positions=32768,
        share=0.25,
        kv_heads=kv_heads,
        head_dim=256,
        qk_norm=norm,
        qkv_bias=biased,
        output_bias=biased,
        output_gate=True,
    )
    interval = card.whole("full_attention_interval", 1, MAX_LAYERS, 4)
    kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    if card.has("layer_types"):
        kinds = layer_types(card, ("linear_attention", "full_attention"))
    delta = _delta(card, by_head)
    layers = [
        pre_norm(norm, attention_spec if kind == "full_attention" else delta, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return decoder(card, layers, norm, names=NAMES)


def _experts(card: ModelCard, experts: int, chosen: int, renormalise: bool) -> ExpertsSpec:
    return ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX, experts, chosen, renormalise=renormalise),
        width=expert_width(card, default=512),
        shared_width=card.whole("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
        shared_gated=True,
    )


def _delta(card: ModelCard, by_head: bool) -> DeltaSpec:
    check_silu(card)
    key_heads = card.whole("linear_num_key_heads", 1, MAX_HEADS, 16)
    heads = card.whole("linear_num_value_heads", 1, MAX_HEADS, 32)
    if heads % key_heads:
        raise card.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads, {heads}")
    return DeltaSpec(
        num_heads=heads,
        head_dim=card.whole("linear_value_head_dim", 1, MAX_WIDTH // heads, 128),
        key_heads=key_heads,
        key_dim=card.whole("linear_key_head_dim", 1, MAX_STATE_SIZE, 128),
        taps=taps(card, "linear_conv_kernel_dim"),
        norm=rms(card),
        by_head=by_head,
    )


FAMILIES = {
    "Qwen3NextForCausalLM": Family(qwen3_next, "Qwen3-Next 80B A3B"),
    "Qwen3_5ForCausalLM": Family(qwen3_5, "Qwen 3.5, text model only"),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5_moe, "Qwen 3.5 MoE, text model only"),
}
