"""Mixture-of-experts models with usual attention: Mixtral, Qwen, OLMoE, Granite, Ernie, gpt-oss, Llama 4, Phi."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.experts import (
    MAX_CHOSEN,
    MAX_EXPERTS,
    ExpertsLayout,
    ExpertsSpec,
    Routing,
    Scoring,
)
from quintet.executor.model_config.families.llama import multiplied_granite, rotated_layers
from quintet.executor.model_config.hf_config import HfConfig, Key
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS
from quintet.executor.model_config.shape import (
    FULL,
    MAX_LAYERS,
    MAX_WIDTH,
    SLIDING,
    Family,
    activation,
    attention,
    decoder,
    gated,
    hidden_size,
    layer_types,
    num_layers,
    pre_norm,
    pre_norm_decoder,
    qwen_windows,
    rms,
    window,
    windowed,
    windows_by_kind,
)
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    NormKind,
    NormSpec,
    QkNormOver,
    Temperature,
)

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
MIXTRAL_NAMES = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)
QWEN_NAMES = Names(
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
)
_ERNIE_NAMES = Names(correction="mlp.moe_statics.e_score_correction_bias", ignored=("model.mtp_*",))
GRANITE_NAMES = Names(
    router="block_sparse_moe.router.layer",
    experts_gate_up="block_sparse_moe.input_linear.weight",
    experts_down="block_sparse_moe.output_linear.weight",
    shared_gate_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
)


def routing(hf_config: HfConfig, scoring: Scoring, experts: int, chosen: int, **switches: Any) -> Routing:
    """Return the routing; ``experts`` and ``chosen`` are the family's defaults, ``switches`` fields of `Routing`."""
    count = hf_config.whole(EXPERTS, 1, MAX_EXPERTS, experts)
    taken = hf_config.whole(CHOSEN, 1, min(count, MAX_CHOSEN), chosen)
    return Routing(experts=count, chosen=taken, scoring=scoring, **switches)


def expert_width(hf_config: HfConfig, key: Key = "moe_intermediate_size", default: int | None = None) -> int:
    """Return the width of an expert. Raises `ConfigError` if its activation is not SiLU."""
    if activation(hf_config, "silu") is not Activation.SILU:
        raise hf_config.wrong("hidden_act", "silu")
    return hf_config.whole(key, 1, MAX_WIDTH, default)


def mixtral(hf_config: HfConfig) -> DecoderSpec:
    """Mixtral: two of eight experts."""
    slides = window(hf_config) if hf_config.has("sliding_window") else None
    mixer = attention(hf_config, positions=131072, theta=1e6, kv_heads=8, window=slides)
    chosen = routing(hf_config, Scoring.SOFTMAX, 8, 2, renormalise=True)
    experts = ExpertsSpec(routing=chosen, width=expert_width(hf_config, "intermediate_size"))
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, experts, names=MIXTRAL_NAMES)


def qwen2(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: many small experts, and a gated shared expert."""
    mixer = attention(hf_config, positions=32768, kv_heads=16, qkv_bias=hf_config.flag("qkv_bias", True))
    renormalise = hf_config.flag("norm_topk_prob", False)
    return _qwen(hf_config, mixer, qwen_experts(hf_config, 60, 4, 1408, 5632, renormalise))


def qwen_experts(
    hf_config: HfConfig, experts: int, chosen: int, width: int, shared_width: int, renormalise: bool
) -> ExpertsSpec:
    """Return softmax experts with a gated shared expert; the numbers are the family's defaults."""
    return ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX, experts, chosen, renormalise=renormalise),
        width=expert_width(hf_config, default=width),
        shared_width=hf_config.whole("shared_expert_intermediate_size", 1, MAX_WIDTH, shared_width),
        shared_gated=True,
    )


def qwen3(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 3 MoE: norms of queries and keys, no shared expert."""
    mixer = attention(
        hf_config, positions=32768, kv_heads=4, qk_norm=rms(hf_config), bias_key="attention_bias"
    )
    chosen = routing(hf_config, Scoring.SOFTMAX, 128, 8, renormalise=hf_config.flag("norm_topk_prob", False))
    return _qwen(hf_config, mixer, ExpertsSpec(routing=chosen, width=expert_width(hf_config, default=768)))


def olmoe(hf_config: HfConfig) -> DecoderSpec:
    """OLMoE: queries and keys normed over all heads."""
    mixer = attention(
        *(hf_config,),
        positions=4096,
        qk_norm=rms(hf_config, 1e-5),
        qk_norm_over=QkNormOver.WHOLE,
        bias_key="attention_bias",
        clip_qkv=hf_config.real("clip_qkv", 1e-6, 1e6) if hf_config.has("clip_qkv") else None,
    )
    chosen = routing(hf_config, Scoring.SOFTMAX, 64, 8, renormalise=hf_config.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing=chosen, width=expert_width(hf_config, "intermediate_size"))
    return pre_norm_decoder(hf_config, rms(hf_config, 1e-5), mixer, experts)


def granite(hf_config: HfConfig) -> DecoderSpec:
    """Granite 3 MoE, with and without a shared expert: Granite's multipliers."""
    shared = hf_config.whole("shared_intermediate_size", 0, MAX_WIDTH, 0) or None
    return multiplied_granite(hf_config, granite_experts(hf_config, shared), names=GRANITE_NAMES)


def granite_experts(hf_config: HfConfig, shared_width: int | None, width: int | None = None) -> ExpertsSpec:
    """Return Granite's experts; ``width``: the default of an expert's width."""
    return ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX_OF_CHOSEN, 8, 2),
        width=expert_width(hf_config, "intermediate_size", width),
        layout=ExpertsLayout.STACKED,
        shared_width=shared_width,
        shared_stacked=True,
    )


def softmax_experts(hf_config: HfConfig, width: int) -> ExpertsSpec:
    """Return experts with softmax routing, shared ones included; ``width``: the family's default of an expert's width."""
    choice = routing(
        *(hf_config, Scoring.SOFTMAX, 64, 6),
        renormalise=hf_config.flag("norm_topk_prob", False),
        scale=hf_config.real("routed_scaling_factor", 1e-9, 1e9, 1.0),
    )
    width, count = expert_width(hf_config, default=width), hf_config.whole(SHARED, 0, MAX_EXPERTS, 2)
    return ExpertsSpec(routing=choice, width=width, shared_width=count * width or None)


def ernie(hf_config: HfConfig) -> DecoderSpec:
    """ERNIE 4.5 MoE: experts in all but the first layer, a routing correction, interleaved rotation."""
    norm = rms(hf_config, 1e-5)
    count = num_layers(hf_config)
    if hf_config.flag("use_bias", False):
        raise hf_config.wrong("use_bias", "false: biases of experts are not supported")
    mixer = attention(hf_config, positions=131072, kv_heads=4, theta=500000.0, interleaved=True)
    experts = softmax_experts(hf_config, width=1536)
    experts = replace(experts, routing=replace(experts.routing, renormalise=True))
    experts = replace(experts, corrected=True, correction_in_row=True)
    step = hf_config.whole("moe_layer_interval", 1, MAX_LAYERS, 1)
    first = hf_config.whole("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = hf_config.whole("moe_layer_end_index", -1, MAX_LAYERS, -1)
    routed = range(first, count if last == -1 else last + 1)
    mlps = [
        experts if layer in routed and (layer + 1) % step == 0 else gated(hf_config) for layer in range(count)
    ]
    layers = [pre_norm(norm, mixer, mlp) for mlp in mlps]
    return decoder(hf_config, layers, norm, names=_ERNIE_NAMES, usually_tied=True)


def first_dense(hf_config: HfConfig, norm: Any, mixer: Any, experts: ExpertsSpec, default: int) -> list[Any]:
    """Return the layers of a model with plain feed-forwards in the first layers."""
    mlps = dense_then(hf_config, experts, default)
    return [pre_norm(norm, mixer, mlp) for mlp in mlps]


def dense_then(hf_config: HfConfig, experts: ExpertsSpec, default: int) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward: plain in the first layers, unless the config lists the kinds."""
    if hf_config.has("mlp_layer_types"):
        is_dense = [
            kind == "dense" for kind in layer_types(hf_config, ("dense", "sparse"), "mlp_layer_types")
        ]
    else:
        dense = hf_config.whole("first_k_dense_replace", 0, MAX_LAYERS, default)
        is_dense = [layer < dense for layer in range(num_layers(hf_config))]
    return [gated(hf_config) if each else experts for each in is_dense]


def sparse(hf_config: HfConfig, experts: ExpertsSpec) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward by Qwen's rule: experts every so many layers, except in listed ones."""
    step = hf_config.whole("decoder_sparse_step", 1, MAX_LAYERS, 1)
    plain = named_layers(hf_config, "mlp_only_layers")
    return [
        gated(hf_config) if layer in plain or (layer + 1) % step else experts
        for layer in range(num_layers(hf_config))
    ]


def _qwen(hf_config: HfConfig, mixer: Any, experts: ExpertsSpec) -> DecoderSpec:
    """Return a model with different feed-forwards and windows per layer."""
    norm = rms(hf_config)
    layers = [pre_norm(norm, mixer, mlp) for mlp in sparse(hf_config, experts)]
    return decoder(hf_config, windowed(layers, qwen_windows(hf_config)), norm, names=QWEN_NAMES)


def named_layers(hf_config: HfConfig, key: str) -> Sequence[int]:
    """Return a list of layer indexes; empty if absent."""
    named = hf_config.values.get(key) or []
    if not isinstance(named, list) or not all(type(each) is int for each in named):
        raise hf_config.wrong(key, "a list of layer numbers")
    return named


MXFP4_GROUP = 32
"""Elements that share a scale."""


def gpt_oss(hf_config: HfConfig) -> DecoderSpec:
    """gpt-oss 20b and 120b. The experts' gates and ups are interleaved in the checkpoint."""
    norm, biased = rms(hf_config, 1e-5, rounds_once=True), hf_config.flag("attention_bias", True)
    mixer = attention(
        *(hf_config,),
        positions=131072,
        theta=150000.0,
        kv_heads=8,
        head_dim=64,
        biased=biased,
        sinks=True,
    )
    expert, hidden = expert_width(hf_config, "intermediate_size", 2880), hidden_size(hf_config)
    packed = hf_config.section("quantization_config").values.get("quant_method") == "mxfp4"
    for key, size in (("intermediate_size", expert), ("hidden_size", hidden)):
        if packed and size % MXFP4_GROUP:
            raise hf_config.wrong(key, f"a multiple of {MXFP4_GROUP}, the group size of MXFP4")
    experts = ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX_OF_CHOSEN, 128, 4),
        width=expert,
        layout=ExpertsLayout.MXFP4 if packed else ExpertsLayout.ALTERNATING,
        router_bias=True,
        biased=True,
        clamp=(
            hf_config.real("swiglu_alpha", 1e-3, 1e3, 1.702),
            hf_config.real("swiglu_limit", 1e-3, 1e6, 7.0),
        ),
    )
    usual = [FULL if layer % 2 else SLIDING for layer in range(num_layers(hf_config))]
    windows = windows_by_kind(hf_config, window(hf_config, 128), usual)
    layers = windowed(pre_norm(norm, mixer, experts), windows)
    return decoder(hf_config, layers, norm, names=Names(router="mlp.router"))


_LLAMA4_NAMES = Names(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    experts_gate_up="feed_forward.experts.gate_up_proj",
    experts_down="feed_forward.experts.down_proj",
    shared_gate="feed_forward.shared_expert.gate_proj",
    shared_up="feed_forward.shared_expert.up_proj",
    shared_down="feed_forward.shared_expert.down_proj",
)


def llama4(hf_config: HfConfig) -> DecoderSpec:
    """Llama 4 Scout and Maverick. The routing weight multiplies the expert's input."""
    norm, count = rms(hf_config, 1e-5), num_layers(hf_config)
    width = expert_width(hf_config, "intermediate_size", 8192)
    experts = ExpertsSpec(
        routing=routing(hf_config, Scoring.SIGMOID, 16, 1, scaled_inputs=True),
        width=width,
        layout=ExpertsLayout.TRANSPOSED,
        shared_width=width,
    )
    plain = gated(hf_config, width=hf_config.whole("intermediate_size_mlp", 1, MAX_WIDTH, 16384))
    step = hf_config.whole("interleave_moe_layer_step", 1, MAX_LAYERS, 1)
    routed = (
        named_layers(hf_config, "moe_layers") if hf_config.has("moe_layers") else range(step - 1, count, step)
    )
    layers = [
        pre_norm(norm, _llama4_attention(hf_config, rotated), experts if layer in routed else plain)
        for layer, rotated in enumerate(rotated_layers(hf_config))
    ]
    return decoder(hf_config, layers, norm, names=_LLAMA4_NAMES)


def _llama4_attention(hf_config: HfConfig, rotated: bool) -> AttentionSpec:
    switches: dict[str, Any] = {"rotated": rotated}
    if rotated:
        switches |= {"interleaved": True, "chunk": window(hf_config, 8192, "attention_chunk_size")}
        if hf_config.flag("use_qk_norm", True):
            switches["qk_norm"] = rms(hf_config, 1e-5, weighted=False)
    elif hf_config.flag("attn_temperature_tuning", True):
        period = hf_config.whole("floor_scale", 1, MAX_POSITIONS, 8192)
        switches["temperature"] = Temperature(hf_config.real("attn_scale", 0.0, 1e3, 0.1), period, 1)
    return attention(
        hf_config,
        positions=131072,
        theta=500000.0,
        kv_heads=8,
        head_dim=128,
        bias_key="attention_bias",
        **switches,
    )


def phi_moe(hf_config: HfConfig) -> DecoderSpec:
    """Phi 3.5 MoE: layer norms, biases on attention, two of sixteen experts by sparse mixer routing."""
    norm = NormSpec(kind=NormKind.LAYER, eps=rms(hf_config, 1e-5).eps, biased=True)
    mixer = attention(
        *(_with_attention_factor(hf_config),),
        positions=131072,
        theta=1e6,
        kv_heads=8,
        window=window(hf_config),
        bias_key="attention_bias",
    )
    choice = routing(
        hf_config, Scoring.SPARSE_MIXER, 16, 2, jitter=hf_config.real("router_jitter_noise", 0.0, 10.0, 0.01)
    )
    experts = ExpertsSpec(routing=choice, width=expert_width(hf_config, "intermediate_size"))
    head_bias = hf_config.flag("lm_head_bias", False)
    return pre_norm_decoder(hf_config, norm, mixer, experts, names=MIXTRAL_NAMES, head_bias=head_bias)


def _with_attention_factor(hf_config: HfConfig) -> HfConfig:
    """Return the config with ``short_mscale`` and ``long_mscale`` renamed to ``attention_factor``."""
    for key in ("rope_parameters", "rope_scaling"):
        parameters = hf_config.section(key)
        if parameters.has("short_mscale") or parameters.has("long_mscale"):
            short, long = (parameters.real(f"{which}_mscale", 1e-6, 1e6) for which in ("short", "long"))
            if short != long:
                raise parameters.wrong(
                    "long_mscale", f"equal to short_mscale, {short:g}: other values are not supported"
                )
            values = {**parameters.values, "attention_factor": short}
            return replace(hf_config, values={**hf_config.values, key: values})
    return hf_config


FAMILIES = {
    "MixtralForCausalLM": Family(mixtral, "Mixtral 8x7B and 8x22B"),
    "Qwen2MoeForCausalLM": Family(qwen2, "Qwen 1.5 MoE A2.7B, Qwen 2 57B A14B"),
    "Qwen3MoeForCausalLM": Family(qwen3, "Qwen 3 30B A3B and 235B A22B, Qwen 3 Coder"),
    "OlmoeForCausalLM": Family(olmoe, "OLMoE 1B-7B"),
    "Ernie4_5_MoeForCausalLM": Family(ernie, "ERNIE 4.5 21B A3B and 300B A47B"),
    "GraniteMoeForCausalLM": Family(granite, "Granite 3 1B A400M and 3B A800M"),
    "GraniteMoeSharedForCausalLM": Family(granite, "Granite MoE with a shared expert"),
    "GptOssForCausalLM": Family(gpt_oss, "gpt-oss 20b and 120b"),
    "Llama4ForCausalLM": Family(llama4, "Llama 4, text model only"),
    "PhiMoEForCausalLM": Family(phi_moe, "Phi 3.5 MoE"),
    "PhimoeForCausalLM": Family(phi_moe, "Phi 3.5 MoE"),
}
