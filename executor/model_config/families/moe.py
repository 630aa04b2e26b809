"""Mixture-of-experts models with usual attention: Mixtral, Qwen, OLMoE, Granite, Ernie, DeepSeek 1, Ling."""

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
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig, Key
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    MAX_LAYERS,
    MAX_WIDTH,
    activation,
    attention,
    decoder,
    factor,
    gated,
    layered_windows,
    num_layers,
    pre_norm,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import Activation, DecoderSpec, FeedForwardSpec, QkNormOver, QkvLayout

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
BAILING_NAMES = Names(
    embedding="model.word_embeddings",
    qkv="attention.query_key_value",
    output="attention.dense",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    correction="mlp.gate.expert_bias",
)
_ERNIE_NAMES = Names(correction="mlp.moe_statics.e_score_correction_bias", ignored=("model.mtp_*",))
_GRANITE_NAMES = Names(
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
    layer = pre_norm(rms(hf_config, 1e-5), mixer, experts)
    return decoder(hf_config, layer, rms(hf_config, 1e-5), names=MIXTRAL_NAMES)


def qwen2(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: many small experts, and a gated shared expert."""
    mixer = attention(hf_config, positions=32768, kv_heads=16, qkv_bias=hf_config.flag("qkv_bias", True))
    chosen = routing(hf_config, Scoring.SOFTMAX, 60, 4, renormalise=hf_config.flag("norm_topk_prob", False))
    experts = ExpertsSpec(
        routing=chosen,
        width=expert_width(hf_config, default=1408),
        shared_width=hf_config.whole("shared_expert_intermediate_size", 1, MAX_WIDTH, 5632),
        shared_gated=True,
    )
    return _qwen(hf_config, mixer, experts)


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
    return decoder(hf_config, pre_norm(rms(hf_config, 1e-5), mixer, experts), rms(hf_config, 1e-5))


def granite(hf_config: HfConfig) -> DecoderSpec:
    """Granite 3 MoE, with and without a shared expert: Granite's multipliers."""
    mixer = attention(
        *(hf_config,),
        positions=2048,
        bias_key="attention_bias",
        scale=factor(hf_config, "attention_multiplier"),
    )
    shared = hf_config.whole("shared_intermediate_size", 0, MAX_WIDTH, 0) or None
    experts = ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX_OF_CHOSEN, 8, 2),
        width=expert_width(hf_config, "intermediate_size"),
        layout=ExpertsLayout.STACKED,
        shared_width=shared,
        shared_stacked=True,
    )
    layer = pre_norm(
        rms(hf_config), mixer, experts, residual_multiplier=factor(hf_config, "residual_multiplier")
    )
    return decoder(
        *(hf_config, layer, rms(hf_config)),
        names=_GRANITE_NAMES,
        embedding_scale=factor(hf_config, "embedding_multiplier"),
        logit_scale=1.0 / factor(hf_config, "logits_scaling"),
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
        names=BAILING_NAMES,
        normalised_head=head,
    )


def ernie(hf_config: HfConfig) -> DecoderSpec:
    """ERNIE 4.5 MoE: experts in all but the first layer, a routing correction, interleaved rotation."""
    norm = rms(hf_config, 1e-5)
    count = num_layers(hf_config)
    tied = hf_config.flag("tie_word_embeddings", True)
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
    return decoder(hf_config, layers, norm, names=_ERNIE_NAMES, tied=tied)


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


def first_dense(hf_config: HfConfig, norm: Any, mixer: Any, experts: ExpertsSpec, default: int) -> list[Any]:
    """Return the layers of a model with plain feed-forwards in the first layers."""
    mlps = dense_then(hf_config, experts, default)
    return [pre_norm(norm, mixer, mlp) for mlp in mlps]


def dense_then(hf_config: HfConfig, experts: ExpertsSpec, default: int) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward: plain in the first layers, unless the config lists the kinds."""
    count, kinds = num_layers(hf_config), hf_config.values.get("mlp_layer_types")
    if kinds is None:
        dense = hf_config.whole("first_k_dense_replace", 0, MAX_LAYERS, default)
        kinds = ["dense" if layer < dense else "sparse" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or not all(k in ("dense", "sparse") for k in kinds):
        raise hf_config.wrong("mlp_layer_types", f"a list of {count} words, each dense or sparse")
    return [experts if kind == "sparse" else gated(hf_config) for kind in kinds[:count]]


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
    slides = layered_windows(hf_config)
    layers = [windowed(layer, (width,))[0] for layer, width in zip(layers, slides, strict=True)]
    return decoder(hf_config, layers, norm, names=QWEN_NAMES)


def named_layers(hf_config: HfConfig, key: str) -> Sequence[int]:
    """Return a list of layer indexes; empty if absent."""
    named = hf_config.values.get(key) or []
    if not isinstance(named, list) or not all(type(each) is int for each in named):
        raise hf_config.wrong(key, "a list of layer numbers")
    return named


FAMILIES = {
    "MixtralForCausalLM": Family(mixtral, "Mixtral 8x7B and 8x22B"),
    "Qwen2MoeForCausalLM": Family(qwen2, "Qwen 1.5 MoE A2.7B, Qwen 2 57B A14B"),
    "Qwen3MoeForCausalLM": Family(qwen3, "Qwen 3 30B A3B and 235B A22B, Qwen 3 Coder"),
    "OlmoeForCausalLM": Family(olmoe, "OLMoE 1B-7B"),
    "DeepseekForCausalLM": Family(deepseek, "DeepSeekMoE 16B"),
    "BailingMoeForCausalLM": Family(bailing, "Ling 1 and 1.5"),
    "Ernie4_5_MoeForCausalLM": Family(ernie, "ERNIE 4.5 21B A3B and 300B A47B"),
    "GraniteMoeForCausalLM": Family(granite, "Granite 3 1B A400M and 3B A800M"),
    "GraniteMoeSharedForCausalLM": Family(granite, "Granite MoE with a shared expert"),
}
