"""OPT and Galactica; BioGPT and XGLM, which have similar tensor names."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    HIDDEN,
    MAX_WIDTH,
    attention,
    decoder,
    hidden_size,
    max_positions,
    plain,
    plain_width,
    pre_norm,
    refuse,
)
from quintet.executor.model_config.spec import (
    DecoderSpec,
    LayerSpec,
    NormKind,
    Norms,
    NormSpec,
    PositionTable,
)

_NAMES = Names(
    prefix="model.",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    layer="model.decoder.layers.{layer}",
    final_norm="model.decoder.final_layer_norm",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)

_BIOGPT = replace(
    _NAMES,
    prefix="biogpt.",
    embedding="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    layer="biogpt.layers.{layer}",
    final_norm="biogpt.layer_norm",
    head="output_projection",
)

_XGLM = replace(
    _NAMES,
    embedding="model.embed_tokens",
    layer="model.layers.{layer}",
    final_norm="model.layer_norm",
    ignored=("model.embed_positions.weights",),
)


def opt(hf_config: HfConfig) -> DecoderSpec:
    """OPT: learned positions with offset 2; 350m has norms after the residual sums and a narrower embedding."""
    biased = hf_config.flag("enable_bias", True)
    affine = hf_config.flag("layer_norm_elementwise_affine", True)
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=affine, biased=affine)
    mixer = attention(hf_config, rotated=False, qkv_bias=biased, output_bias=biased)
    mlp = plain(hf_config, "relu", width=plain_width(hf_config, "ffn_dim"), biased=biased)
    before, post_norms = hf_config.flag("do_layer_norm_before", True), Norms(of_sum=norm)
    layer = (
        pre_norm(norm, mixer, mlp)
        if before
        else LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=post_norms, mlp_norms=post_norms)
    )
    hidden, count = hidden_size(hf_config), max_positions(hf_config, 2048)
    width = hf_config.whole("word_embed_proj_dim", 1, MAX_WIDTH, hidden)
    return decoder(
        hf_config,
        layer,
        norm if before and not hf_config.flag("_remove_final_layer_norm", False) else None,
        names=_NAMES,
        positions=PositionTable(count=count, offset=2),
        reach=count,
        embedding_width=None if width == hidden else width,
        tied=hf_config.flag("tie_word_embeddings", True),
    )


def biogpt(hf_config: HfConfig) -> DecoderSpec:
    """BioGPT: OPT with scaled embeddings."""
    norm, count = NormSpec(kind=NormKind.LAYER, eps=1e-5, biased=True), max_positions(hf_config, 1024)
    mixer = attention(hf_config, rotated=False, qkv_bias=True, output_bias=True)
    scaled = hf_config.flag("scale_embedding", True)
    return decoder(
        hf_config,
        pre_norm(norm, mixer, plain(hf_config, "gelu", biased=True)),
        norm,
        names=_BIOGPT,
        positions=PositionTable(count=count, offset=2),
        embedding_scale=hidden_size(hf_config) ** 0.5 if scaled else 1.0,
        tied=hf_config.flag("tie_word_embeddings", True),
    )


def xglm(hf_config: HfConfig) -> DecoderSpec:
    """XGLM: sinusoidal positions, scaled embeddings."""
    refuse(hf_config, "add_cross_attention")
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, biased=True)
    count = max_positions(hf_config, 2048)
    hidden = hidden_size(hf_config)
    if hidden < 4:
        raise hf_config.wrong(HIDDEN, "at least 4, for sinusoidal positions")
    mixer = attention(hf_config, rotated=False, qkv_bias=True, output_bias=True)
    mlp = plain(hf_config, "gelu", width=plain_width(hf_config, "ffn_dim"), biased=True)
    return decoder(
        hf_config,
        pre_norm(norm, mixer, mlp),
        norm,
        names=_XGLM,
        positions=PositionTable(count=count, offset=2, sinusoidal=True),
        embedding_scale=hidden**0.5 if hf_config.flag("scale_embedding", True) else 1.0,
        tied=hf_config.flag("tie_word_embeddings", True),
    )


FAMILIES = {
    "OPTForCausalLM": Family(opt, "OPT, Galactica"),
    "XGLMForCausalLM": Family(xglm, "XGLM"),
    "BioGptForCausalLM": Family(biogpt, "BioGPT"),
}
