"""gpt-oss: attention sinks, sliding windows in every other layer, biased experts with clamped gates, MXFP4 or plain."""

from __future__ import annotations

from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    attention,
    decoder,
    hidden_size,
    layer_types,
    num_layers,
    pre_norm,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import DecoderSpec

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
        qkv_bias=biased,
        output_bias=biased,
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
    width, kinds = window(hf_config, 128), ["sliding_attention", "full_attention"] * num_layers(hf_config)
    if hf_config.has("layer_types"):
        kinds = layer_types(hf_config, ("sliding_attention", "full_attention"))
    slides = [width if kind == "sliding_attention" else None for kind in kinds[: num_layers(hf_config)]]
    layers = windowed(pre_norm(norm, mixer, experts), slides)
    return decoder(hf_config, layers, norm, names=Names(router="mlp.router"))


FAMILIES = {"GptOssForCausalLM": Family(gpt_oss, "gpt-oss 20b and 120b")}
