"""OLMo 1, 2 and 3, FlexOlmo; EXAONE 4, which has the same layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    FULL,
    SLIDING,
    attention,
    decoder,
    every_full,
    gated,
    head_width,
    layer_kinds,
    nullable,
    num_layers,
    pre_norm,
    rms,
    window,
)
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormKind,
    Norms,
    NormSpec,
    QkNormOver,
)


def olmo(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 1: norms without weights; clipped queries, keys and values."""
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=False)
    clip = nullable(hf_config, "clip_qkv", 1e-3, 1e6)
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias", clip_qkv=clip)
    return decoder(hf_config, pre_norm(norm, mixer, gated(hf_config)), norm)


def olmo2(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 2: norms after blocks instead of before; queries and keys normed over all heads."""
    norm = _norm(hf_config)
    return decoder(hf_config, _post_norm_layer(hf_config, _olmo2(hf_config, positions=2048), norm), norm)


def olmo3(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 3: three of four layers have a sliding window; the others may have another rotation."""
    dim, mixers = head_width(hf_config), {}
    for kind, width in ((FULL, None), (SLIDING, window(hf_config, 4096))):
        rope = rope_spec(hf_config, dim, 2048, theta=500000.0, layer_type=kind, scaled=kind == FULL)
        mixers[kind] = _olmo2(hf_config, rope=rope, window=width)
    kinds = layer_kinds(hf_config, every_full(hf_config, 4))
    norm = _norm(hf_config)
    return decoder(hf_config, tuple(_post_norm_layer(hf_config, mixers[kind], norm) for kind in kinds), norm)


def flex_olmo(hf_config: HfConfig) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with OLMoE's experts."""
    mixer = _olmo2(hf_config, positions=4096, theta=500000.0)
    choice = routing(hf_config, Scoring.SOFTMAX, 7, 5, renormalise=hf_config.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing=choice, width=expert_width(hf_config, "intermediate_size"))
    norm = _norm(hf_config)
    return decoder(hf_config, _post_norm_layer(hf_config, mixer, norm, experts), norm)


def exaone4(hf_config: HfConfig) -> DecoderSpec:
    """EXAONE 4: norms of queries and keys per head, norms after blocks."""
    norm = rms(hf_config, 1e-5)
    return decoder(
        hf_config, tuple(_post_norm_layer(hf_config, mixer, norm) for mixer in exaone_mixers(hf_config)), norm
    )


def exaone_mixers(hf_config: HfConfig) -> list[AttentionSpec]:
    """Return each layer's attention: if some layers have a sliding window, the others have no rotation."""
    mixer, width = attention(hf_config, positions=2048, qk_norm=rms(hf_config, 1e-5)), window(hf_config, 4096)
    kinds = [FULL] * num_layers(hf_config) if width is None else layer_kinds(hf_config, _pattern(hf_config))
    sliding, full = replace(mixer, window=width), mixer if width is None else replace(mixer, rope=None)
    return [sliding if kind == SLIDING else full for kind in kinds]


def _pattern(hf_config: HfConfig) -> list[str]:
    """Return layer kinds: ``sliding_window_pattern`` is a period that ends with a full layer, or a string of letters."""
    letters = hf_config.values.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return [FULL if letters[i % len(letters)] == "G" else SLIDING for i in range(num_layers(hf_config))]
    return every_full(hf_config, hf_config.whole("sliding_window_pattern", 1, 1024, 4))


def _olmo2(hf_config: HfConfig, **switches: Any) -> AttentionSpec:
    return attention(
        hf_config,
        bias_key="attention_bias",
        qk_norm=_norm(hf_config),
        qk_norm_over=QkNormOver.WHOLE,
        **switches,
    )


def _norm(hf_config: HfConfig) -> NormSpec:
    return rms(hf_config, 1e-5, rounds_once=True)


def _post_norm_layer(
    hf_config: HfConfig, mixer: AttentionSpec, norm: NormSpec, mlp: FeedForwardSpec | None = None
) -> LayerSpec:
    norms = Norms(after=norm)
    return LayerSpec(mixer=mixer, mlp=mlp or gated(hf_config), mixer_norms=norms, mlp_norms=norms)


FAMILIES = {
    "OlmoForCausalLM": Family(olmo, "OLMo 1"),
    "Olmo2ForCausalLM": Family(olmo2, "OLMo 2"),
    "Olmo3ForCausalLM": Family(olmo3, "OLMo 3"),
    "FlexOlmoForCausalLM": Family(flex_olmo, "FlexOlmo 7x7B"),
    "Exaone4ForCausalLM": Family(exaone4, "EXAONE 4"),
}
