"""OLMo 1, 2 and 3, FlexOlmo; EXAONE 4, which has the same layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.family import Family
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


def olmo(card: ModelCard) -> DecoderSpec:
    """OLMo 1: norms without weights; clipped queries, keys and values."""
    norm, biased = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=False), card.flag("attention_bias", False)
    clip = nullable(card, "clip_qkv", 1e-3, 1e6)
    mixer = attention(card, positions=2048, qkv_bias=biased, output_bias=biased, clip_qkv=clip)
    return decoder(card, (pre_norm(norm, mixer, gated(card)),) * num_layers(card), norm)


def olmo2(card: ModelCard) -> DecoderSpec:
    """OLMo 2: norms after blocks instead of before; queries and keys normed over all heads."""
    norm = _norm(card)
    return decoder(
        card, (_post_norm_layer(card, _olmo2(card, positions=2048), norm),) * num_layers(card), norm
    )


def olmo3(card: ModelCard) -> DecoderSpec:
    """OLMo 3: three of four layers have a sliding window; the others may have another rotation."""
    dim, mixers = head_width(card), {}
    for kind, width in ((FULL, None), (SLIDING, window(card, 4096))):
        rope = rope_spec(card, dim, 2048, theta=500000.0, layer_type=kind, scaled=kind == FULL)
        mixers[kind] = _olmo2(card, rope=rope, window=width)
    kinds = layer_kinds(card, every_full(card, 4))
    norm = _norm(card)
    return decoder(card, tuple(_post_norm_layer(card, mixers[kind], norm) for kind in kinds), norm)


def flex_olmo(card: ModelCard) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with OLMoE's experts."""
    mixer = _olmo2(card, positions=4096, theta=500000.0)
    choice = routing(card, Scoring.SOFTMAX, 7, 5, renormalise=card.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing=choice, width=expert_width(card, "intermediate_size"))
    norm = _norm(card)
    return decoder(card, (_post_norm_layer(card, mixer, norm, experts),) * num_layers(card), norm)


def exaone4(card: ModelCard) -> DecoderSpec:
    """EXAONE 4: norms of queries and keys per head, norms after blocks."""
    norm = rms(card, 1e-5)
    return decoder(card, tuple(_post_norm_layer(card, mixer, norm) for mixer in exaone_mixers(card)), norm)


def exaone_mixers(card: ModelCard) -> list[AttentionSpec]:
    """Return each layer's attention: if some layers have a sliding window, the others have no rotation."""
    mixer, width = attention(card, positions=2048, qk_norm=rms(card, 1e-5)), window(card, 4096)
    kinds = [FULL] * num_layers(card) if width is None else layer_kinds(card, _pattern(card))
    sliding, full = replace(mixer, window=width), mixer if width is None else replace(mixer, rope=None)
    return [sliding if kind == SLIDING else full for kind in kinds]


def _pattern(card: ModelCard) -> list[str]:
    """Return layer kinds: ``sliding_window_pattern`` is a period that ends with a full layer, or a string of letters."""
    letters = card.values.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return [FULL if letters[i % len(letters)] == "G" else SLIDING for i in range(num_layers(card))]
    return every_full(card, card.whole("sliding_window_pattern", 1, 1024, 4))


def _olmo2(card: ModelCard, **switches: Any) -> AttentionSpec:
    biased = card.flag("attention_bias", False)
    return attention(
        card,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=_norm(card),
        qk_norm_over=QkNormOver.WHOLE,
        **switches,
    )


def _norm(card: ModelCard) -> NormSpec:
    return rms(card, 1e-5, rounds_once=True)


def _post_norm_layer(
    card: ModelCard, mixer: AttentionSpec, norm: NormSpec, mlp: FeedForwardSpec | None = None
) -> LayerSpec:
    norms = Norms(after=norm)
    return LayerSpec(mixer=mixer, mlp=mlp or gated(card), mixer_norms=norms, mlp_norms=norms)


FAMILIES = {
    "OlmoForCausalLM": Family(olmo, "OLMo 1"),
    "Olmo2ForCausalLM": Family(olmo2, "OLMo 2"),
    "Olmo3ForCausalLM": Family(olmo3, "OLMo 3"),
    "FlexOlmoForCausalLM": Family(flex_olmo, "FlexOlmo 7x7B"),
    "Exaone4ForCausalLM": Family(exaone4, "EXAONE 4"),
}
