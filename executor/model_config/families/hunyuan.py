"""HunYuan V1: norms of queries and keys after rotation; its base may be scaled by a constant."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import RopeSpec, rope_spec
from quintet.executor.model_config.shape import (
    attention,
    decoder,
    gated,
    head_width,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec

_NAMES = Names(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate="mlp.shared_mlp.gate_proj",
    shared_up="mlp.shared_mlp.up_proj",
    shared_down="mlp.shared_mlp.down_proj",
)
_LISTED = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
"""Keys that cards may list per layer, with equal values."""


def dense(card: ModelCard) -> DecoderSpec:
    """HunYuan 0.5B to 7B, Hunyuan-MT."""
    norm = rms(card, 1e-5)
    layers = (pre_norm(norm, _attention(card), gated(card)),) * num_layers(card)
    return decoder(card, layers, norm, names=_NAMES)


def routed(card: ModelCard) -> DecoderSpec:
    """Hunyuan-A13B: softmax over all experts, and a shared expert."""
    card, norm = _once(card), rms(card, 1e-5)
    width = expert_width(card, ("moe_intermediate_size", "intermediate_size"))
    experts = ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX, 64, 8, renormalise=True),
        width=width,
        shared_width=card.whole("num_shared_expert", 1, 64, 1) * width,
    )
    layers = (pre_norm(norm, _attention(card), experts),) * num_layers(card)
    return decoder(card, layers, norm, names=_NAMES)


def _once(card: ModelCard) -> ModelCard:
    """Return the card with lists of equal numbers replaced by the number."""
    values = dict(card.values)
    for key in _LISTED:
        listed = values.get(key)
        if isinstance(listed, list):
            if not listed or any(each != listed[0] for each in listed):
                raise card.wrong(key, "one number, the same for all layers")
            values[key] = listed[0]
    return replace(card, values=values)


def _attention(card: ModelCard) -> AttentionSpec:
    if card.flag("use_cla", False):
        raise card.wrong("use_cla", "false: cross-layer KV sharing is not supported")
    biased, dim, norm = card.flag("attention_bias", False), head_width(card), rms(card, 1e-5)
    return attention(
        *(card,),
        head_dim=dim,
        rope=_rotation(card, dim),
        qk_norm=norm if card.flag("use_qk_norm", True) else None,
        qk_norm_after_rope=True,
        qkv_bias=biased,
        output_bias=biased,
    )


def _rotation(card: ModelCard, dim: int) -> RopeSpec:
    """Read the rotation: ``alpha`` scales the base for every length, although cards call the type dynamic."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if card.section(key).has("alpha")), None)
    if key is None:
        return rope_spec(card, dim, 2048)
    parameters = dict(card.section(key).values)
    kind = card.section(key).word(("rope_type", "type"), ("dynamic", "default"), "dynamic")
    if dim < 4:
        raise card.wrong("head_dim", "at least 4 if rope_scaling has alpha")
    parameters |= {"rope_type": "default", "type": "default"}
    rope = rope_spec(replace(card, values={**card.values, key: parameters}), dim, 2048)
    alpha = card.section(key).real("alpha", 1.0, 1e6)
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2))) if kind == "dynamic" else rope


FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(dense, "HunYuan 0.5B to 7B, Hunyuan-MT"),
    "HunYuanMoEV1ForCausalLM": Family(routed, "Hunyuan-A13B"),
}
