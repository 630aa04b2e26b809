"""Qwen3-Next and Qwen 3.5: the gated delta rule in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quintet.executor.model_config.families.mamba import MAX_STATE_SIZE, check_silu, taps
from quintet.executor.model_config.families.moe import QWEN_NAMES, qwen_experts, sparse
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.shape import (
    FULL,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    attention,
    decoder,
    gated,
    layer_kinds,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, FeedForwardSpec
from quintet.executor.model_config.state_specs import DeltaSpec

NAMES = replace(QWEN_NAMES, state_mixer="linear_attn", ignored=("mtp.*",))


def qwen3_next(hf_config: HfConfig) -> DecoderSpec:
    """Qwen3-Next: experts with a gated shared expert, optionally not in all layers."""
    experts = qwen_experts(hf_config, 512, 10, 512, 512, hf_config.flag("norm_topk_prob", True))
    return _hybrid(hf_config, sparse(hf_config, experts), kv_heads=2)


def qwen3_5(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 3.5: dense feed-forwards."""
    return _hybrid(hf_config, [gated(hf_config)] * num_layers(hf_config), kv_heads=4, by_head=False)


def qwen3_5_moe(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 3.5 MoE: experts in all layers."""
    experts = qwen_experts(hf_config, 256, 8, 512, 512, renormalise=True)
    return _hybrid(hf_config, [experts] * num_layers(hf_config), kv_heads=2, by_head=False)


def _hybrid(
    hf_config: HfConfig, mlps: Sequence[FeedForwardSpec], kv_heads: int, by_head: bool = True
) -> DecoderSpec:
    """Build the decoder: 1/4 of each head is rotated, norms have offset 1."""
    norm, count = rms(hf_config, offset=1.0), num_layers(hf_config)
    attention_spec = attention(
        *(hf_config,),
        positions=32768,
        share=0.25,
        kv_heads=kv_heads,
        head_dim=256,
        qk_norm=norm,
        bias_key="attention_bias",
        output_gate=True,
    )
    interval = hf_config.whole("full_attention_interval", 1, MAX_LAYERS, 4)
    usual = ["linear_attention" if (layer + 1) % interval else FULL for layer in range(count)]
    kinds = layer_kinds(hf_config, usual, ("linear_attention", FULL))
    delta = _delta(hf_config, by_head)
    layers = [
        pre_norm(norm, attention_spec if kind == FULL else delta, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return decoder(hf_config, layers, norm, names=NAMES)


def _delta(hf_config: HfConfig, by_head: bool) -> DeltaSpec:
    check_silu(hf_config)
    key_heads = hf_config.whole("linear_num_key_heads", 1, MAX_HEADS, 16)
    heads = hf_config.whole("linear_num_value_heads", 1, MAX_HEADS, 32)
    if heads % key_heads:
        raise hf_config.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads, {heads}")
    return DeltaSpec(
        num_heads=heads,
        head_dim=hf_config.whole("linear_value_head_dim", 1, MAX_WIDTH // heads, 128),
        key_heads=key_heads,
        key_dim=hf_config.whole("linear_key_head_dim", 1, MAX_STATE_SIZE, 128),
        taps=taps(hf_config, "linear_conv_kernel_dim"),
        norm=rms(hf_config),
        by_head=by_head,
    )


FAMILIES = {
    "Qwen3NextForCausalLM": Family(qwen3_next, "Qwen3-Next 80B A3B"),
    "Qwen3_5ForCausalLM": Family(qwen3_5, "Qwen 3.5, text model only"),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5_moe, "Qwen 3.5 MoE, text model only"),
}
