"""Mixture-of-experts models with usual attention: Mixtral, Qwen, OLMoE, Granite, Ernie, DeepSeek 1, Ling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import Key, ModelCard
from quintet.executor.model_config.experts import (
    MAX_CHOSEN,
    MAX_EXPERTS,
    ExpertsLayout,
    ExpertsSpec,
    Routing,
    Scoring,
)
from quintet.executor.model_config.family import Family
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


def routing(card: ModelCard, scoring: Scoring, experts: int, chosen: int, **switches: Any) -> Routing:
    """Return the routing; ``experts`` and ``chosen`` are the family's defaults, ``switches`` fields of `Routing`."""
    count = card.whole(EXPERTS, 1, MAX_EXPERTS, experts)
    taken = card.whole(CHOSEN, 1, min(count, MAX_CHOSEN), chosen)
    return Routing(experts=count, chosen=taken, scoring=scoring, **switches)


def grouped(
    card: ModelCard, groups: int, chosen_groups: int, best: int, experts: int, chosen: int
) -> dict[str, Any]:
    """Return the `Routing` fields of group-limited selection; the arguments are the family's defaults."""
    count = card.whole(EXPERTS, 1, MAX_EXPERTS, experts)
    groups = card.whole("n_group", 1, count, groups)
    if count % groups or count // groups < best:
        raise card.wrong("n_group", f"a number that divides {count} experts into groups of at least {best}")
    kept = card.whole("topk_group", 1, groups, chosen_groups)
    if card.whole("num_experts_per_tok", 1, MAX_CHOSEN, chosen) > kept * (count // groups):
        raise card.wrong(
            "num_experts_per_tok", f"at most the {kept * (count // groups)} experts of {kept} groups"
        )
    return {"groups": groups, "chosen_groups": kept, "group_best": best} if groups > 1 else {}


def expert_width(card: ModelCard, key: Key = "moe_intermediate_size", default: int | None = None) -> int:
    """Return the width of an expert. Raises `ConfigError` if its activation is not SiLU."""
    if activation(card, "silu") is not Activation.SILU:
        raise card.wrong("hidden_act", "silu")
    return card.whole(key, 1, MAX_WIDTH, default)


def mixtral(card: ModelCard) -> DecoderSpec:
    """Mixtral: two of eight experts."""
    slides = window(card) if card.has("sliding_window") else None
    mixer = attention(card, positions=131072, theta=1e6, kv_heads=8, window=slides)
    chosen = routing(card, Scoring.SOFTMAX, 8, 2, renormalise=True)
    experts = ExpertsSpec(routing=chosen, width=expert_width(card, "intermediate_size"))
    layer = pre_norm(rms(card, 1e-5), mixer, experts)
    return decoder(card, (layer,) * num_layers(card), rms(card, 1e-5), names=MIXTRAL_NAMES)


def qwen2(card: ModelCard) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: many small experts, and a gated shared expert."""
    mixer = attention(card, positions=32768, kv_heads=16, qkv_bias=card.flag("qkv_bias", True))
    chosen = routing(card, Scoring.SOFTMAX, 60, 4, renormalise=card.flag("norm_topk_prob", False))
    experts = ExpertsSpec(
        routing=chosen,
        width=expert_width(card, default=1408),
        shared_width=card.whole("shared_expert_intermediate_size", 1, MAX_WIDTH, 5632),
        shared_gated=True,
    )
    return _qwen(card, mixer, experts)


def qwen3(card: ModelCard) -> DecoderSpec:
    """Qwen 3 MoE: norms of queries and keys, no shared expert."""
    biased = card.flag("attention_bias", False)
    mixer = attention(
        card, positions=32768, kv_heads=4, qk_norm=rms(card), qkv_bias=biased, output_bias=biased
    )
    chosen = routing(card, Scoring.SOFTMAX, 128, 8, renormalise=card.flag("norm_topk_prob", False))
    return _qwen(card, mixer, ExpertsSpec(routing=chosen, width=expert_width(card, default=768)))


def olmoe(card: ModelCard) -> DecoderSpec:
    """OLMoE: queries and keys normed over all heads."""
    biased = card.flag("attention_bias", False)
    mixer = attention(
        *(card,),
        positions=4096,
        qk_norm=rms(card, 1e-5),
        qk_norm_over=QkNormOver.WHOLE,
        qkv_bias=biased,
        output_bias=biased,
        clip_qkv=card.real("clip_qkv", 1e-6, 1e6) if card.has("clip_qkv") else None,
    )
    chosen = routing(card, Scoring.SOFTMAX, 64, 8, renormalise=card.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing=chosen, width=expert_width(card, "intermediate_size"))
    return decoder(card, (pre_norm(rms(card, 1e-5), mixer, experts),) * num_layers(card), rms(card, 1e-5))


def granite(card: ModelCard) -> DecoderSpec:
    """Granite 3 MoE, with and without a shared expert: Granite's multipliers."""
    biased = card.flag("attention_bias", False)
    mixer = attention(
        *(card,),
        positions=2048,
        qkv_bias=biased,
        output_bias=biased,
        scale=factor(card, "attention_multiplier"),
    )
    shared = card.whole("shared_intermediate_size", 0, MAX_WIDTH, 0) or None
    experts = ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX_OF_CHOSEN, 8, 2),
        width=expert_width(card, "intermediate_size"),
        layout=ExpertsLayout.STACKED,
        shared_width=shared,
        shared_stacked=True,
    )
    layer = pre_norm(rms(card), mixer, experts, residual_multiplier=factor(card, "residual_multiplier"))
    return decoder(
        *(card, (layer,) * num_layers(card), rms(card)),
        names=_GRANITE_NAMES,
        embedding_scale=factor(card, "embedding_multiplier"),
        logit_scale=1.0 / factor(card, "logits_scaling"),
    )


def softmax_experts(card: ModelCard, *, experts: int, chosen: int, shared: int, width: int) -> ExpertsSpec:
    """Return experts with softmax routing, shared ones included; the arguments are the family's defaults."""
    choice = routing(
        *(card, Scoring.SOFTMAX, experts, chosen),
        renormalise=card.flag("norm_topk_prob", False),
        scale=card.real("routed_scaling_factor", 1e-9, 1e9, 1.0),
    )
    width, count = expert_width(card, default=width), card.whole(SHARED, 0, MAX_EXPERTS, shared)
    return ExpertsSpec(routing=choice, width=width, shared_width=count * width or None)


def deepseek(card: ModelCard) -> DecoderSpec:
    """DeepSeekMoE 16B: Llama's attention, softmax over many small experts, shared experts."""
    norm, biased = rms(card), card.flag("attention_bias", False)
    mixer = attention(card, positions=2048, qkv_bias=biased, output_bias=biased)
    experts = softmax_experts(card, experts=64, chosen=6, shared=2, width=1407)
    return decoder(card, first_dense(card, norm, mixer, experts, 0), norm)


def bailing(card: ModelCard) -> DecoderSpec:
    """Ling and Ling-lite 1.5: as DeepSeekMoE, with other tensor names and stacked queries, keys and values."""
    norm, biased = rms(card), card.flag("use_qkv_bias", False)
    mixer = attention(
        *(card,),
        positions=16384,
        kv_heads=4,
        theta=600000.0,
        qkv_bias=biased,
        output_bias=card.flag("use_bias", False),
        layout=QkvLayout.STACKED,
    )
    experts = softmax_experts(card, experts=64, chosen=6, shared=2, width=1408)
    head = card.flag("norm_head", False)
    return decoder(
        card, first_dense(card, norm, mixer, experts, 0), norm, names=BAILING_NAMES, normalised_head=head
    )


def ernie(card: ModelCard) -> DecoderSpec:
    """ERNIE 4.5 MoE: experts in all but the first layer, a routing correction, interleaved rotation."""
    norm, count, tied = rms(card, 1e-5), num_layers(card), card.flag("tie_word_embeddings", True)
    if card.flag("use_bias", False):
        raise card.wrong("use_bias", "false: biases of experts are not supported")
    mixer = attention(card, positions=131072, kv_heads=4, theta=500000.0, interleaved=True)
    experts = softmax_experts(card, experts=64, chosen=6, shared=2, width=1536)
    experts = replace(experts, routing=replace(experts.routing, renormalise=True))
    experts = replace(experts, corrected=True, correction_in_row=True)
    step = card.whole("moe_layer_interval", 1, MAX_LAYERS, 1)
    first = card.whole("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = card.whole("moe_layer_end_index", -1, MAX_LAYERS, -1)
    routed = range(first, count if last == -1 else last + 1)
    mlps = [experts if layer in routed and (layer + 1) % step == 0 else gated(card) for layer in range(count)]
    layers = [pre_norm(norm, mixer, mlp) for mlp in mlps]
    return decoder(card, layers, norm, names=_ERNIE_NAMES, tied=tied)


def sigmoid_experts(
    card: ModelCard,
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
    width = expert_width(card, default=width)
    choice = routing(
        *(card, Scoring.SIGMOID, experts, chosen),
        renormalise=card.flag("norm_topk_prob", renormalise),
        scale=card.real("routed_scaling_factor", 1e-9, 1e9, scale),
        **grouped(card, groups, chosen_groups, 2, experts, chosen),
    )
    shared = card.whole(SHARED, 0, MAX_EXPERTS, shared)
    return ExpertsSpec(routing=choice, width=width, corrected=True, shared_width=shared * width or None)


def first_dense(card: ModelCard, norm: Any, mixer: Any, experts: ExpertsSpec, default: int) -> list[Any]:
    """Return the layers of a model with plain feed-forwards in the first layers."""
    mlps = dense_then(card, experts, default)
    return [pre_norm(norm, mixer, mlp) for mlp in mlps]


def dense_then(card: ModelCard, experts: ExpertsSpec, default: int) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward: plain in the first layers, unless the card lists the kinds."""
    count, kinds = num_layers(card), card.values.get("mlp_layer_types")
    if kinds is None:
        dense = card.whole("first_k_dense_replace", 0, MAX_LAYERS, default)
        kinds = ["dense" if layer < dense else "sparse" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(k in ("dense", "sparse") for k in kinds):
        raise card.wrong("mlp_layer_types", f"a list of {count} words, each dense or sparse")
    return [experts if kind == "sparse" else gated(card) for kind in kinds]


def sparse(card: ModelCard, experts: ExpertsSpec) -> list[FeedForwardSpec]:
    """Return each layer's feed-forward by Qwen's rule: experts every so many layers, except in listed ones."""
    step, plain = card.whole("decoder_sparse_step", 1, MAX_LAYERS, 1), named_layers(card, "mlp_only_layers")
    return [
        gated(card) if layer in plain or (layer + 1) % step else experts for layer in range(num_layers(card))
    ]


def _qwen(card: ModelCard, mixer: Any, experts: ExpertsSpec) -> DecoderSpec:
    """Return a model with different feed-forwards and windows per layer."""
    norm = rms(card)
    layers = [pre_norm(norm, mixer, mlp) for mlp in sparse(card, experts)]
    slides = layered_windows(card)
    layers = [windowed(layer, (width,))[0] for layer, width in zip(layers, slides, strict=True)]
    return decoder(card, layers, norm, names=QWEN_NAMES)


def named_layers(card: ModelCard, key: str) -> Sequence[int]:
    """Return a list of layer indexes; empty if absent."""
    named = card.values.get(key) or []
    if not isinstance(named, list) or not all(type(each) is int for each in named):
        raise card.wrong(key, "a list of layer numbers")
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
