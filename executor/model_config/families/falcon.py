"""BLOOM, Falcon and MPT: usually ALiBi; queries, keys and values in one tensor."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    Family,
    attention,
    decoder,
    head_width,
    hidden_size,
    layer_norm,
    max_positions,
    nullable,
    num_heads,
    num_kv_heads,
    plain,
    plain_width,
    pre_norm,
    pre_norm_decoder,
    side_by_side,
)
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    MlpSpec,
    NormSpec,
    PositionTable,
    QkNormOver,
    QkvLayout,
)

_MEGATRON_NAMES: dict[str, Any] = {
    "prefix": "transformer.",
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "layer": "transformer.h.{layer}",
    "final_norm": "transformer.ln_f",
    "qkv": "self_attention.query_key_value",
    "output": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def alibi_slopes(count: int, octaves: float = 8.0) -> tuple[float, ...]:
    """Return the ALiBi slopes of ``count`` heads.

    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input length extrapolation",
    2022. For a power of two, the slopes are a geometric series that ends at 2^-octaves. For other counts, the slopes
    of the next lower power of two are followed by every other slope of the next higher one.
    """
    below = 1 << (count.bit_length() - 1)

    def series(of: int) -> list[float]:
        return [2.0 ** (-octaves * (index + 1) / of) for index in range(of)]

    return tuple((series(below) + series(2 * below)[0::2])[:count])


def bloom(hf_config: HfConfig) -> DecoderSpec:
    """BLOOM, BLOOMZ: ALiBi, a norm after the embedding, biases."""
    norm = layer_norm(hf_config)
    mixer = attention(
        hf_config,
        rotated=False,
        alibi=alibi_slopes(num_heads(hf_config)),
        biased=True,
        layout=QkvLayout.GROUPED,
    )
    mlp = plain(hf_config, "gelu_new", width=4 * hidden_size(hf_config), biased=True)
    of_norm = hf_config.flag("apply_residual_connection_post_layernorm", False)
    layer = pre_norm(norm, mixer, mlp, residual_of_norm=of_norm)
    return decoder(
        hf_config,
        layer,
        norm,
        names=Names(**_MEGATRON_NAMES),
        embedding_norm=norm,
        reach=max_positions(hf_config, 2048),
        usually_tied=True,
    )


def falcon(hf_config: HfConfig) -> DecoderSpec:
    """Falcon: 7b has parallel layers with one norm, 40b and 180b with two; rw is sequential with ALiBi."""
    grouped, norm = hf_config.flag("new_decoder_architecture", False), layer_norm(hf_config)
    mixer, mlp = _falcon_attention(hf_config, grouped), _falcon_mlp(hf_config)
    names, layer = Names(**_MEGATRON_NAMES), pre_norm(norm, mixer, mlp)
    if grouped and hf_config.whole("num_ln_in_parallel_attn", 1, 2, 2) == 2:
        layer = pre_norm(norm, mixer, mlp, parallel=True)
        names = Names(**_MEGATRON_NAMES, mixer_norm="ln_attn", mlp_norm="ln_mlp")
    elif grouped or hf_config.flag("parallel_attn", True):
        layer = side_by_side(norm, mixer, mlp)
    reach: dict[str, Any] = {} if mixer.rope else {"reach": max_positions(hf_config, 2048)}
    return decoder(hf_config, layer, norm, names=names, usually_tied=True, **reach)


def _falcon_mlp(hf_config: HfConfig) -> MlpSpec:
    biased = hf_config.flag("bias", False)
    return plain(hf_config, "gelu", width=plain_width(hf_config, "ffn_hidden_size"), biased=biased)


def _falcon_attention(hf_config: HfConfig, grouped: bool) -> AttentionSpec:
    """Return Falcon's attention: it adds ALiBi before scaling scores, and computes slopes in bfloat16."""
    biased, heads, scale = hf_config.flag("bias", False), num_heads(hf_config), head_width(hf_config) ** -0.5
    single = not grouped and hf_config.flag("multi_query", True)
    alibi = hf_config.flag("alibi", False)
    return attention(
        hf_config,
        positions=2048,
        rotated=not alibi,
        num_kv_heads=num_kv_heads(hf_config) if grouped else 1 if single else heads,
        alibi=tuple(_bfloat16(slope) * scale for slope in alibi_slopes(heads)) if alibi else (),
        biased=biased,
        layout=QkvLayout.GROUPED,
    )


def _bfloat16(value: float) -> float:
    """Round to bfloat16 (eight significant bits), ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded


_MPT_NAMES = Names(
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
    mixer = _mpt_attention(hf_config, settings, norm)
    return pre_norm_decoder(
        *(hf_config, norm, mixer, mlp),
        names=_MPT_NAMES,
        positions=None if mixer.alibi else PositionTable(count=count),
        reach=count,
        usually_tied=True,
        logit_scale=_logit_scale(hf_config),
    )


def _mpt_attention(hf_config: HfConfig, settings: HfConfig, norm: NormSpec) -> AttentionSpec:
    settings.word("attn_type", ("multihead_attention",), "multihead_attention")
    octaves, scale = settings.real("alibi_bias_max", 1, 64, 8), settings.values.get("softmax_scale")
    mixer = attention(
        hf_config,
        rotated=False,
        alibi=alibi_slopes(num_heads(hf_config), octaves) if settings.flag("alibi", True) else (),
        biased=norm.biased,
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
    "BloomForCausalLM": Family(bloom, "BLOOM, BLOOMZ"),
    "FalconForCausalLM": Family(falcon, "Falcon 7b, 11b, 40b, 180b, rw"),
    "RWForCausalLM": Family(falcon, "first conversions of Falcon"),
    "MptForCausalLM": Family(mpt, "MPT"),
    "MPTForCausalLM": Family(mpt, "MPT, by its own code"),
}
