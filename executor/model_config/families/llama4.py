"""Llama 4, its text model: chunked attention, layers without rotation, one routed and one shared expert."""

from __future__ import annotations

from typing import Any

from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, named_layers, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS
from quintet.executor.model_config.shape import (
    MAX_LAYERS,
    MAX_WIDTH,
    attention,
    decoder,
    gated,
    num_layers,
    pre_norm,
    rms,
    rotated_layers,
    window,
)
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, Temperature

_NAMES = Names(
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
        pre_norm(norm, _attention(hf_config, rotated), experts if layer in routed else plain)
        for layer, rotated in enumerate(rotated_layers(hf_config))
    ]
    return decoder(hf_config, layers, norm, names=_NAMES)


def _attention(hf_config: HfConfig, rotated: bool) -> AttentionSpec:
    biased = hf_config.flag("attention_bias", False)
    spec: dict[str, Any] = {
        "positions": 131072,
        "theta": 500000.0,
        "kv_heads": 8,
        "head_dim": 128,
        "qkv_bias": biased,
        "output_bias": biased,
    }
    if rotated:
        normed = hf_config.flag("use_qk_norm", True)
        return attention(
            *(hf_config,),
            **spec,
            interleaved=True,
            chunk=window(hf_config, 8192, "attention_chunk_size"),
            qk_norm=rms(hf_config, 1e-5, weighted=False) if normed else None,
        )
    period = hf_config.whole("floor_scale", 1, MAX_POSITIONS, 8192)
    tuned = hf_config.flag("attn_temperature_tuning", True)
    growth = hf_config.real("attn_scale", 0.0, 1e3, 0.1)
    return attention(
        *(hf_config,), **spec, rotated=False, temperature=Temperature(growth, period, 1) if tuned else None
    )


FAMILIES = {"Llama4ForCausalLM": Family(llama4, "Llama 4, text model only")}
