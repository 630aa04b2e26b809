"""MPT."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    alibi_slopes,
    attention,
    decoder,
    hidden_size,
    layer_norm,
    max_positions,
    nullable,
    num_heads,
    plain,
    pre_norm,
)
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    NormSpec,
    PositionTable,
    QkNormOver,
    QkvLayout,
)

_NAMES = Names(
    prefix="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.blocks.{layer}",
    final_norm="transformer.norm_f",
    mixer_norm="norm_1",
    mlp_norm="norm_2",
    qkv="attn.Wqkv",
    q_norm="attn.q_ln",
    k_norm="attn.k_ln",
    output="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


def mpt(hf_config: HfConfig) -> DecoderSpec:
    """MPT: ALiBi or learned positions; usually without biases."""
    biased, settings = not hf_config.flag("no_bias", True), hf_config.section("attn_config")
    norm, count = layer_norm(hf_config, biased=biased), max_positions(hf_config, 2048)
    width = hf_config.whole("expansion_ratio", 1, 64, 4) * hidden_size(hf_config)
    mlp = plain(hf_config, "gelu", width=width, biased=biased)
    mixer = _attention(hf_config, settings, norm)
    return decoder(
        hf_config,
        pre_norm(norm, mixer, mlp),
        norm,
        names=_NAMES,
        positions=None if mixer.alibi else PositionTable(count=count),
        reach=count,
        tied=hf_config.flag("tie_word_embeddings", True),
        logit_scale=_logit_scale(hf_config),
    )


def _attention(hf_config: HfConfig, settings: HfConfig, norm: NormSpec) -> AttentionSpec:
    settings.word("attn_type", ("multihead_attention",), "multihead_attention")
    octaves, scale = settings.real("alibi_bias_max", 1, 64, 8), settings.values.get("softmax_scale")
    mixer = attention(
        hf_config,
        rotated=False,
        alibi=alibi_slopes(num_heads(hf_config), octaves) if settings.flag("alibi", True) else (),
        qkv_bias=norm.biased,
        output_bias=norm.biased,
        clip_qkv=nullable(settings, "clip_qkv", 1e-3, 1e6),
        qk_norm=norm if settings.flag("qk_ln", False) else None,
        qk_norm_over=QkNormOver.WHOLE,
        layout=QkvLayout.STACKED,
    )
    return mixer if scale is None else replace(mixer, scale=settings.real("softmax_scale", 1e-6, 1e6))


def _logit_scale(hf_config: HfConfig) -> float:
    if hf_config.values.get("logit_scale") == "inv_sqrt_d_model":
        return float(hidden_size(hf_config) ** -0.5)
    return hf_config.real("logit_scale", 1e-6, 1e6, 1.0)


FAMILIES = {
    "MptForCausalLM": Family(mpt, "MPT"),
    "MPTForCausalLM": Family(mpt, "MPT, by its own code"),
}
