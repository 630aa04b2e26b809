"""OPT and Galactica; BioGPT and XGLM, which have similar tensor names."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    HIDDEN,
    MAX_WIDTH,
    attention,
    decoder,
    hidden_size,
    max_positions,
    num_layers,
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


def opt(card: ModelCard) -> DecoderSpec:
    """OPT: learned positions with offset 2; 350m has norms after the residual sums and a narrower embedding."""
    biased, affine = card.flag("enable_bias", True), card.flag("layer_norm_elementwise_affine", True)
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=affine, biased=affine)
    mixer = attention(card, rotated=False, qkv_bias=biased, output_bias=biased)
    mlp = plain(card, "relu", width=plain_width(card, "ffn_dim"), biased=biased)
    before, post_norms = card.flag("do_layer_norm_before", True), Norms(of_sum=norm)
    layer = (
        pre_norm(norm, mixer, mlp)
        if before
        else LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=post_norms, mlp_norms=post_norms)
    )
    hidden, count = hidden_size(card), max_positions(card, 2048)
    width = card.whole("word_embed_proj_dim", 1, MAX_WIDTH, hidden)
    return decoder(
        card,
        (layer,) * num_layers(card),
        norm if before and not card.flag("_remove_final_layer_norm", False) else None,
        names=_NAMES,
        positions=PositionTable(count=count, offset=2),
        reach=count,
        embedding_width=None if width == hidden else width,
        tied=card.flag("tie_word_embeddings", True),
    )


def biogpt(card: ModelCard) -> DecoderSpec:
    """BioGPT: OPT with scaled embeddings."""
    norm, count = NormSpec(kind=NormKind.LAYER, eps=1e-5, biased=True), max_positions(card, 1024)
    mixer = attention(card, rotated=False, qkv_bias=True, output_bias=True)
    scaled = card.flag("scale_embedding", True)
    return decoder(
        card,
        (pre_norm(norm, mixer, plain(card, "gelu", biased=True)),) * num_layers(card),
        norm,
        names=_BIOGPT,
        positions=PositionTable(count=count, offset=2),
        embedding_scale=hidden_size(card) ** 0.5 if scaled else 1.0,
        tied=card.flag("tie_word_embeddings", True),
    )


def xglm(card: ModelCard) -> DecoderSpec:
    """XGLM: sinusoidal positions, scaled embeddings."""
    refuse(card, "add_cross_attention")
    norm, count, hidden = (
        NormSpec(kind=NormKind.LAYER, eps=1e-5, biased=True),
        max_positions(card, 2048),
        hidden_size(card),
    )
    if hidden < 4:
        raise card.wrong(HIDDEN, "at least 4, for sinusoidal positions")
    mixer = attention(card, rotated=False, qkv_bias=True, output_bias=True)
    mlp = plain(card, "gelu", width=plain_width(card, "ffn_dim"), biased=True)
    return decoder(
        card,
        (pre_norm(norm, mixer, mlp),) * num_layers(card),
        norm,
        names=_XGLM,
        positions=PositionTable(count=count, offset=2, sinusoidal=True),
        embedding_scale=hidden**0.5 if card.flag("scale_embedding", True) else 1.0,
        tied=card.flag("tie_word_embeddings", True),
    )


FAMILIES = {
    "OPTForCausalLM": Family(opt, "OPT, Galactica"),
    "XGLMForCausalLM": Family(xglm, "XGLM"),
    "BioGptForCausalLM": Family(biogpt, "BioGPT"),
}
