"""HunYuan V1: norms of queries and keys after rotation; its base may be scaled by a constant."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import RopeSpec, rope_spec
from quintet.executor.model_config.shape import (
    Family,
    attention,
    gated,
    head_width,
    pre_norm_decoder,
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
"""Keys that configs may list per layer, with equal values."""


def dense(hf_config: HfConfig) -> DecoderSpec:
    """HunYuan 0.5B to 7B, Hunyuan-MT."""
    norm = rms(hf_config, 1e-5)
    return pre_norm_decoder(hf_config, norm, _attention(hf_config), gated(hf_config), names=_NAMES)


def routed(hf_config: HfConfig) -> DecoderSpec:
    """Hunyuan-A13B: softmax over all experts, and a shared expert."""
    hf_config, norm = _once(hf_config), rms(hf_config, 1e-5)
    width = expert_width(hf_config, ("moe_intermediate_size", "intermediate_size"))
    experts = ExpertsSpec(
        routing=routing(hf_config, Scoring.SOFTMAX, 64, 8, renormalise=True),
        width=width,
        shared_width=hf_config.whole("num_shared_expert", 1, 64, 1) * width,
    )
    return pre_norm_decoder(hf_config, norm, _attention(hf_config), experts, names=_NAMES)


def _once(hf_config: HfConfig) -> HfConfig:
    """Return the config with lists of equal numbers replaced by the number."""
    values = dict(hf_config.values)
    for key in _LISTED:
        listed = values.get(key)
        if isinstance(listed, list):
            if not listed or any(each != listed[0] for each in listed):
                raise hf_config.wrong(key, "one number, the same for all layers")
            values[key] = listed[0]
    return replace(hf_config, values=values)


def _attention(hf_config: HfConfig) -> AttentionSpec:
    if hf_config.flag("use_cla", False):
        raise hf_config.wrong("use_cla", "false: cross-layer KV sharing is not supported")
    dim, norm = head_width(hf_config), rms(hf_config, 1e-5)
    return attention(
        *(hf_config,),
        head_dim=dim,
        rope=_rotation(hf_config, dim),
        qk_norm=norm if hf_config.flag("use_qk_norm", True) else None,
        qk_norm_after_rope=True,
        bias_key="attention_bias",
    )


def _rotation(hf_config: HfConfig, dim: int) -> RopeSpec:
    """Read the rotation: ``alpha`` scales the base for every length, although configs call the type dynamic."""
    key = next(
        (key for key in ("rope_parameters", "rope_scaling") if hf_config.section(key).has("alpha")), None
    )
    if key is None:
        return rope_spec(hf_config, dim, 2048)
    parameters = dict(hf_config.section(key).values)
    kind = hf_config.section(key).word(("rope_type", "type"), ("dynamic", "default"), "dynamic")
    if dim < 4:
        raise hf_config.wrong("head_dim", "at least 4 if rope_scaling has alpha")
    parameters |= {"rope_type": "default", "type": "default"}
    rope = rope_spec(replace(hf_config, values={**hf_config.values, key: parameters}), dim, 2048)
    alpha = hf_config.section(key).real("alpha", 1.0, 1e6)
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2))) if kind == "dynamic" else rope


FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(dense, "HunYuan 0.5B to 7B, Hunyuan-MT"),
    "HunYuanMoEV1ForCausalLM": Family(routed, "Hunyuan-A13B"),
}
