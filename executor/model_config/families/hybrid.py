"""Models of attention layers and layers with a state: Jamba, Bamba, Falcon-H1, Granite 4 and LFM2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quintet.executor.model_config.experts import MAX_EXPERTS, ExpertsSpec, Scoring
from quintet.executor.model_config.families.llama import biased_gated
from quintet.executor.model_config.families.mamba import (
    check_silu,
    dt_rank,
    expanded,
    groups,
    heads,
    state_size,
    taps,
)
from quintet.executor.model_config.families.moe import (
    EXPERTS,
    GRANITE_NAMES,
    expert_width,
    granite_experts,
    named_layers,
    routing,
)
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    MAX_LAYERS,
    MAX_WIDTH,
    WIDTH,
    Family,
    attention,
    decoder,
    factor,
    gated,
    hidden_size,
    layer_kinds,
    layer_types,
    max_positions,
    num_layers,
    pre_norm,
    pre_norm_decoder,
    rms,
)
from quintet.executor.model_config.spec import (
    Activation,
    DecoderSpec,
    FeedForwardSpec,
    MlpLayout,
    MlpSpec,
    NormSpec,
    ParallelMixerSpec,
)
from quintet.executor.model_config.state_specs import Mamba2Spec, MambaSpec, ShortConvSpec

_MOST = 1e6
"""Limit of a factor."""

_NAMES = Names(
    final_norm="model.final_layernorm",
    state_mixer="mamba",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    expert_gate="feed_forward.experts.{expert}.gate_proj",
    expert_up="feed_forward.experts.{expert}.up_proj",
    expert_down="feed_forward.experts.{expert}.down_proj",
)


def jamba(hf_config: HfConfig) -> DecoderSpec:
    """Jamba: attention without positions in every eighth layer; Mamba 1 with inner norms in the others."""
    norm = rms(hf_config)
    check_silu(hf_config)
    mamba = MambaSpec(
        channels=expanded(hf_config, "mamba_expand"),
        state_size=state_size(hf_config, "mamba_d_state", 16),
        dt_rank=dt_rank(hf_config, "mamba_dt_rank"),
        taps=taps(hf_config, "mamba_d_conv"),
        conv_bias=hf_config.flag("mamba_conv_bias", True),
        projection_bias=hf_config.flag("mamba_proj_bias", False),
        inner_norm=norm,
    )
    attention_spec = attention(hf_config, kv_heads=8, rotated=False)
    is_attention, is_routed = _every(hf_config, "attn_layer", 8, 4), _every(hf_config, "expert_layer", 2, 1)
    plain, routed = gated(hf_config), _jamba_experts(hf_config)
    layers = [
        pre_norm(
            norm, attention_spec if is_attention(layer) else mamba, routed if is_routed(layer) else plain
        )
        for layer in range(num_layers(hf_config))
    ]
    names = replace(_NAMES, router="feed_forward.router")
    return decoder(hf_config, layers, norm, names=names, reach=max_positions(hf_config, 262144))


def _every(hf_config: HfConfig, key: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a predicate for the layers of a period and offset; ``period`` and ``offset`` are the family's defaults."""
    period = hf_config.whole(f"{key}_period", 1, MAX_LAYERS, period)
    offset = hf_config.whole(f"{key}_offset", 0, period - 1, min(offset, period - 1))
    return lambda layer: layer % period == offset


def _jamba_experts(hf_config: HfConfig) -> FeedForwardSpec:
    """Return Jamba's experts; a plain feed-forward if there is only one."""
    if hf_config.whole(EXPERTS, 1, MAX_EXPERTS, 16) == 1:
        return gated(hf_config)
    return ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX, 16, 2), width=expert_width(hf_config, "intermediate_size")
    )


def _mamba2(hf_config: HfConfig, norm: NormSpec | None, channels: int) -> Mamba2Spec:
    """Return Mamba 2 from the keys of hybrid models."""
    check_silu(hf_config)
    count = hf_config.whole("mamba_n_heads", 1, MAX_WIDTH, 128)
    biased = hf_config.flag("mamba_proj_bias", False)
    return Mamba2Spec(
        **heads(hf_config, norm, count, "mamba_d_head", channels),
        groups=groups(hf_config, "mamba_n_groups", 1, count),
        state_size=state_size(hf_config, "mamba_d_state", 256),
        taps=taps(hf_config, "mamba_d_conv"),
        conv_bias=hf_config.flag("mamba_conv_bias", True),
        projection_bias=biased,
        output_bias=biased,
    )


def bamba(hf_config: HfConfig) -> DecoderSpec:
    """Bamba: Mamba 2, and attention in the listed layers with half of each head rotated."""
    norm = rms(hf_config, 1e-5)
    mamba = _mamba2(hf_config, norm, expanded(hf_config, "mamba_expand"))
    mixer = attention(hf_config, kv_heads=8, positions=262144, share=0.5, bias_key="attention_bias")
    layer = pre_norm(norm, mixer, biased_gated(hf_config))
    listed = named_layers(hf_config, "attn_layer_indices")
    layers = [
        layer if index in listed else replace(layer, mixer=mamba) for index in range(num_layers(hf_config))
    ]
    return decoder(hf_config, layers, norm, names=_NAMES)


def _factors(hf_config: HfConfig, key: str, count: int, each_of: str) -> tuple[float, ...]:
    """Return a list of ``count`` factors; ones if the config has none."""
    return hf_config.reals(key, count, -_MOST, _MOST, each_of) if hf_config.has(key) else (1.0,) * count


def falcon_h1(hf_config: HfConfig) -> DecoderSpec:
    """Falcon-H1: attention and Mamba 2 in parallel in every layer, with factors."""
    norm = rms(hf_config, 1e-5)
    by_factor = "mamba_d_ssm" in hf_config.values and not hf_config.has("mamba_d_ssm")
    channels = (
        expanded(hf_config, "mamba_expand")
        if by_factor
        else hf_config.whole("mamba_d_ssm", 1, MAX_WIDTH, 1024)
    )
    normed = norm if hf_config.flag("mamba_rms_norm", False) else None
    gate, channel, inputs, outputs, dt = _factors(hf_config, "ssm_multipliers", 5, "part of the projection")
    mamba = replace(
        _mamba2(hf_config, normed, channels),
        norm_before_gate=normed is not None and hf_config.flag("mamba_norm_before_gate", True),
        output_bias=hf_config.flag("projectors_bias", False),
        multipliers=(gate, channel, inputs, outputs, dt),
    )
    biased = hf_config.flag("attention_bias", False)
    attention_spec = attention(hf_config, positions=8192, kv_heads=8, biased=biased)
    # A factor of keys is a factor of scores if keys have no bias.
    attention_spec = replace(attention_spec, scale=attention_spec.scale * factor(hf_config, "key_multiplier"))
    if biased and factor(hf_config, "key_multiplier") != 1.0:
        raise hf_config.wrong("attention_bias", "false if key_multiplier is not 1")
    both = ParallelMixerSpec(
        state=mamba,
        attention=attention_spec,
        state_factors=(factor(hf_config, "ssm_in_multiplier"), factor(hf_config, "ssm_out_multiplier")),
        attention_factors=(
            factor(hf_config, "attention_in_multiplier"),
            factor(hf_config, "attention_out_multiplier"),
        ),
    )
    gate_factor, down_factor = _factors(hf_config, "mlp_multipliers", 2, "of gates and outputs")
    mlp = gated(
        hf_config,
        biased=hf_config.flag("mlp_bias", False),
        gate_multiplier=gate_factor,
        down_multiplier=down_factor,
    )
    return pre_norm_decoder(
        *(hf_config, norm, both, mlp),
        names=_NAMES,
        embedding_scale=factor(hf_config, "embedding_multiplier"),
        logit_scale=factor(hf_config, "lm_head_multiplier"),
    )


def granite_hybrid(hf_config: HfConfig) -> DecoderSpec:
    """Granite 4: Mamba 2, and attention in some layers, with or without rotation."""
    norm = rms(hf_config)
    rotated = hf_config.values.get("position_embedding_type") == "rope"
    attention_spec = attention(
        hf_config,
        positions=2048,
        rotated=rotated,
        scale=factor(hf_config, "attention_multiplier"),
        bias_key="attention_bias",
    )
    layer = pre_norm(
        norm,
        attention_spec,
        _granite_mlp(hf_config),
        residual_multiplier=factor(hf_config, "residual_multiplier"),
    )
    mamba = replace(layer, mixer=_mamba2(hf_config, norm, expanded(hf_config, "mamba_expand")))
    known = ("mamba", "linear_attention", "attention", "full_attention")
    kinds = layer_kinds(hf_config, ["mamba"] * num_layers(hf_config), known)
    names = replace(
        GRANITE_NAMES,
        state_mixer="mamba",
        gate_up=GRANITE_NAMES.shared_gate_up,
        down=GRANITE_NAMES.shared_down,
    )
    return decoder(
        hf_config,
        [layer if kind in ("attention", "full_attention") else mamba for kind in kinds],
        norm,
        names=names,
        reach=max_positions(hf_config, 2048) if attention_spec.rope is None else attention_spec.rope.reach,
        embedding_scale=factor(hf_config, "embedding_multiplier"),
        logit_scale=1.0 / factor(hf_config, "logits_scaling"),
    )


def _granite_mlp(hf_config: HfConfig) -> FeedForwardSpec:
    """Return the shared feed-forward, combined with experts if the model has them."""
    shared = hf_config.whole("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    if hf_config.whole("num_local_experts", 0, MAX_EXPERTS, 8) == 0:
        return MlpSpec(width=shared, activation=Activation.SILU, layout=MlpLayout.STACKED)
    return granite_experts(hf_config, shared, width=11008)


_LFM_NAMES = Names(
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


def _lfm2_width(hf_config: HfConfig) -> int:
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
    return decoder(hf_config, layers, norm, names=_LFM_NAMES, tied=tied)


def lfm2(hf_config: HfConfig) -> DecoderSpec:
    """LFM2."""
    return _lfm2(
        hf_config, [MlpSpec(width=_lfm2_width(hf_config), activation=Activation.SILU)] * num_layers(hf_config)
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
    "JambaForCausalLM": Family(jamba, "Jamba"),
    "BambaForCausalLM": Family(bamba, "Bamba"),
    "FalconH1ForCausalLM": Family(falcon_h1, "Falcon-H1"),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid, "Granite 4 H"),
    "Lfm2ForCausalLM": Family(lfm2, "LFM2"),
    "Lfm2MoeForCausalLM": Family(lfm2_moe, "LFM2 with experts: 8B A1B"),
}
