"""GLM-4 and GLM-Edge: interleaved rotation of half of each head; gates and ups in one tensor."""

from __future__ import annotations

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import attention, decoder, gated, rms
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, MlpLayout, Norms

_EPS = 1.5625e-7


def glm(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4-9B, GLM-Edge: norms before blocks."""
    return _decoder(hf_config, Norms(before=rms(hf_config, _EPS)), Names())


def glm4(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4-0414: norms before and after blocks."""
    norm = rms(hf_config, _EPS)
    names = Names(mixer_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    return _decoder(hf_config, Norms(before=norm, after=norm), names)


def _decoder(hf_config: HfConfig, norms: Norms, names: Names) -> DecoderSpec:
    mixer = attention(
        hf_config,
        positions=131072,
        share=0.5,
        kv_heads=2,
        head_dim=128,
        interleaved=True,
        qkv_bias=hf_config.flag("attention_bias", True),
    )
    mlp = gated(hf_config, layout=MlpLayout.STACKED)
    layer = LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=norms, mlp_norms=norms)
    return decoder(hf_config, layer, rms(hf_config, _EPS), names=names)


FAMILIES = {
    "GlmForCausalLM": Family(glm, "GLM-4-9B, GLM-Edge"),
    "Glm4ForCausalLM": Family(glm4, "GLM-4-0414"),
}
