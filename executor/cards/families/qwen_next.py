"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in the fourth, experts in all."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.experts import ExpertsSpec
from quintet.executor.cards.families.mamba import MAX_STATE_SIZE, silu_only, taps
from quintet.executor.cards.families.routed import QWEN_NAMES, expert_width, routing, sparse
from quintet.executor.cards.families.shape import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    attention,
    decoder,
    layer_types,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.cards.family import Family
from quintet.executor.cards.routing import Scoring
from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.cards.state_specs import DeltaSpec

NAMES = replace(QWEN_NAMES, state_mixer="linear_attn", ignored=("mtp.*",))


def _delta(card: ModelCard) -> DeltaSpec:
    silu_only(card)
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
    )


def qwen3_next(card: ModelCard) -> DecoderSpec:
    """Qwen3-Next: a quarter of each head rotated, norms of weights less one."""
    norm, biased, count = rms(card, offset=1.0), card.flag("attention_bias", False), num_layers(card)
    attends = attention(
        *(card,),
        positions=32768,
        share=0.25,
        kv_heads=2,
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
    experts = ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX, 512, 10, renormalise=card.flag("norm_topk_prob", True)),
        width=expert_width(card, default=512),
        shared_width=card.whole("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
        shared_gated=True,
    )
    layers = [
        pre_norm(norm, attends if kind == "full_attention" else _delta(card), mlp)
        for kind, mlp in zip(kinds, sparse(card, experts), strict=True)
    ]
    return decoder(card, layers, norm, names=NAMES, reach=attends.rope.reach if attends.rope else 0)


FAMILIES = {"Qwen3NextForCausalLM": Family(qwen3_next, "Qwen3-Next 80B A3B")}
