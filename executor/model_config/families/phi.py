"""Phi 1, 1.5 and 2; Phi 3, 3.5 and 4; Phi 3.5 MoE."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import MIXTRAL_NAMES, expert_width, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    attention,
    decoder,
    gated,
    layer_norm,
    plain,
    pre_norm_decoder,
    rms,
    side_by_side,
    window,
)
from quintet.executor.model_config.spec import DecoderSpec, MlpLayout, NormKind, NormSpec, QkvLayout


def phi(hf_config: HfConfig) -> DecoderSpec:
    """Phi 1 and 2: parallel attention and feed-forward after one norm, biases, half of each head rotated."""
    norm, normed = layer_norm(hf_config), hf_config.flag("qk_layernorm", False)
    mixer = attention(
        hf_config,
        positions=2048,
        share=0.5,
        biased=True,
        qk_norm=norm if normed else None,
    )
    layer = side_by_side(norm, mixer, plain(hf_config, "gelu_new", biased=True))
    names = Names(
        final_norm="model.final_layernorm",
        output="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
    )
    return decoder(hf_config, layer, norm, names=names, head_bias=True)


def phi3(hf_config: HfConfig) -> DecoderSpec:
    """Phi 3 and 4: Llama with stacked tensors."""
    norm = rms(hf_config, 1e-5)
    mixer = attention(hf_config, positions=4096, window=window(hf_config), layout=QkvLayout.STACKED)
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config, layout=MlpLayout.STACKED))


def phi_moe(hf_config: HfConfig) -> DecoderSpec:
    """Phi 3.5 MoE: layer norms, biases on attention, two of sixteen experts by sparse mixer routing."""
    norm = NormSpec(kind=NormKind.LAYER, eps=rms(hf_config, 1e-5).eps, biased=True)
    mixer = attention(
        *(_with_factor(hf_config),),
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


def _with_factor(hf_config: HfConfig) -> HfConfig:
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
    "PhiMoEForCausalLM": Family(phi_moe, "Phi 3.5 MoE"),
    "PhimoeForCausalLM": Family(phi_moe, "Phi 3.5 MoE"),
    "PhiForCausalLM": Family(phi, "Phi 1, 1.5 and 2"),
    "Phi3ForCausalLM": Family(phi3, "Phi 3, 3.5 and 4"),
}
