"""LFM2: short convolutions between gates, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.mamba import taps
from quintet.executor.model_config.families.moe import routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    MAX_LAYERS,
    MAX_WIDTH,
    WIDTH,
    attention,
    decoder,
    hidden_size,
    layer_types,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import Activation, DecoderSpec, FeedForwardSpec, MlpSpec
from quintet.executor.model_config.state_specs import ShortConvSpec

NAMES = Names(
    final_norm="model.embedding_norm",
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    state_mixer="conv",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{expert}.w1",
    expert_up="feed_forward.experts.{expert}.w3",
    expert_down="feed_forward.experts.{expert}.w2",
)


def _width(hf_config: HfConfig) -> int:
    """Return the feed-forward's width: 2/3 of the config's times a factor, rounded up, unless adjustment is disabled."""
    width = hf_config.whole(("block_ff_dim", WIDTH), 1, MAX_WIDTH, 12288)
    if not hf_config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    width = int(hf_config.real("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * width)
    unit = hf_config.whole("block_multiple_of", 1, MAX_WIDTH, 256)
    return -(-width // unit) * unit


def _lfm2(hf_config: HfConfig, feed_forwards: Sequence[FeedForwardSpec]) -> DecoderSpec:
    norm, count = rms(hf_config, 1e-5), num_layers(hf_config)
    attention_spec = attention(hf_config, positions=128000, theta=1e6, kv_heads=8, qk_norm=norm)
    conv = ShortConvSpec(
        channels=hidden_size(hf_config),
        taps=taps(hf_config, "conv_L_cache", 3),
        biased=hf_config.flag("conv_bias", False),
    )
    if hf_config.has("layer_types"):
        has_attention = [
            kind == "full_attention" for kind in layer_types(hf_config, ("conv", "full_attention"))
        ]
    else:
        listed = hf_config.values.get("full_attn_idxs")
        has_attention = [listed is None or layer in listed for layer in range(count)]
    layers = [
        pre_norm(norm, attention_spec if each else conv, mlp)
        for each, mlp in zip(has_attention, feed_forwards, strict=True)
    ]
    tied = hf_config.flag(("tie_embedding", "tie_word_embeddings"), True)
    return decoder(hf_config, layers, norm, names=NAMES, tied=tied)


def lfm2(hf_config: HfConfig) -> DecoderSpec:
    """LFM2."""
    return _lfm2(
        hf_config, [MlpSpec(width=_width(hf_config), activation=Activation.SILU)] * num_layers(hf_config)
    )


def lfm2_moe(hf_config: HfConfig) -> DecoderSpec:
    """LFM2 MoE: experts in all but the first layers, selected as in DeepSeek V3."""
    dense = hf_config.whole("num_dense_layers", 0, MAX_LAYERS, 2)
    plain = MlpSpec(width=hf_config.whole(WIDTH, 1, MAX_WIDTH, 7168), activation=Activation.SILU)
    choice = routing(
        *(hf_config, Scoring.SIGMOID, 32, 4),
        renormalise=hf_config.flag("norm_topk_prob", True),
        addend=1e-6,
        scale=hf_config.real("routed_scaling_factor", 1e-9, 1e9, 1.0),
    )
    experts = ExpertsSpec(
        routing=choice,
        width=hf_config.whole("moe_intermediate_size", 1, MAX_WIDTH, 1792),
        corrected=hf_config.flag("use_expert_bias", True),
    )
    return _lfm2(hf_config, [plain if layer < dense else experts for layer in range(num_layers(hf_config))])


FAMILIES = {
    "Lfm2ForCausalLM": Family(lfm2, "LFM2"),
    "Lfm2MoeForCausalLM": Family(lfm2_moe, "LFM2 with experts: 8B A1B"),
}
