"""Decoders with norms after their blocks: Gemma, OLMo 2 and 3, EXAONE 4, GLM-4; the first versions of these families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.experts import ExpertsSpec, Scoring
from quintet.executor.model_config.families.moe import expert_width, routing
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    FULL,
    SLIDING,
    Family,
    attention,
    decoder,
    every_full,
    gated,
    head_width,
    hidden_size,
    layer_kinds,
    normed_layer,
    nullable,
    num_layers,
    pre_norm,
    pre_norm_decoder,
    refuse,
    rms,
    window,
    windowed,
    windows_by_kind,
)
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MlpLayout,
    MlpSpec,
    NormKind,
    Norms,
    NormSpec,
    QkNormOver,
)

_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Default values of the text part in a multimodal config."""


def gemma(hf_config: HfConfig) -> DecoderSpec:
    """Gemma 1: Llama's layer."""
    mixer = _gemma_attention(hf_config, positions=8192)
    layer = pre_norm(rms(hf_config, offset=1.0), mixer, _gemma_mlp(hf_config))
    return _gemma_decoder(hf_config, layer)


def gemma2(hf_config: HfConfig) -> DecoderSpec:
    """Gemma 2: soft caps of scores and logits; every other layer has a sliding window."""
    layer = _gemma_layer(hf_config, _capped(hf_config, positions=8192))
    return _gemma2_decoder(hf_config, layer)


def vault_gemma(hf_config: HfConfig) -> DecoderSpec:
    """VaultGemma: Gemma 2 without the norms after blocks."""
    mixer, norm = _capped(hf_config, positions=8192), rms(hf_config, offset=1.0)
    return _gemma2_decoder(hf_config, pre_norm(norm, mixer, _gemma_mlp(hf_config)))


def _gemma2_decoder(hf_config: HfConfig, layer: LayerSpec) -> DecoderSpec:
    windows = windows_by_kind(hf_config, window(hf_config, 4096), every_full(hf_config, 2))
    names = Names(mlp_norm="pre_feedforward_layernorm")
    return _gemma_decoder(hf_config, windowed(layer, windows), cap=30.0, names=names)


def gemma3(hf_config: HfConfig) -> DecoderSpec:
    """Gemma 3, the text model: norms of queries and keys; five of six layers have a sliding window and another rotation.

    ``max_position_embeddings`` includes the factor of linear scaling.
    """
    hf_config = replace(hf_config, values={**_GEMMA3, **hf_config.values})
    kinds = layer_kinds(
        hf_config, every_full(hf_config, hf_config.whole("sliding_window_pattern", 1, 1024, 6))
    )
    dim = head_width(hf_config, 256)
    full = rope_spec(hf_config, dim, 131072, theta=1e6, layer_type=FULL)
    local = rope_spec(
        hf_config, dim, 131072, layer_type=SLIDING, theta_key="rope_local_base_freq", scaled=False
    )
    mixer = _capped(hf_config, None, rope=full, qk_norm=rms(hf_config, offset=1.0))
    sliding = replace(mixer, rope=local, window=window(hf_config, 4096))
    layers = (_gemma_layer(hf_config, sliding if kind == SLIDING else mixer) for kind in kinds)
    names = Names(mlp_norm="pre_feedforward_layernorm")
    return _gemma_decoder(hf_config, tuple(layers), names=names, reach=full.max_positions)


def _gemma_attention(hf_config: HfConfig, **switches: Any) -> AttentionSpec:
    refuse(hf_config, "use_bidirectional_attention")
    return attention(hf_config, head_dim=256, bias_key="attention_bias", **switches)


def _gemma_mlp(hf_config: HfConfig) -> MlpSpec:
    """Return the feed-forward; Gemma's first configs write ``gelu`` for its tanh approximation."""
    return replace(gated(hf_config, "gelu_pytorch_tanh"), activation=Activation.GELU_TANH)


def _capped(hf_config: HfConfig, default: float | None = 50.0, **switches: Any) -> AttentionSpec:
    """``default``: the cap if the config has none."""
    return _gemma_attention(
        hf_config,
        kv_heads=4,
        scale=hf_config.real("query_pre_attn_scalar", 1e-6, 1e6, 256) ** -0.5,
        softcap=nullable(hf_config, "attn_logit_softcapping", 1e-6, 1e6, default),
        **switches,
    )


def _gemma_layer(hf_config: HfConfig, mixer: AttentionSpec) -> LayerSpec:
    norm = rms(hf_config, offset=1.0)
    return normed_layer(Norms(before=norm, after=norm), mixer, _gemma_mlp(hf_config))


def _gemma_decoder(
    hf_config: HfConfig, layers: LayerSpec | Sequence[LayerSpec], cap: float | None = None, **switches: Any
) -> DecoderSpec:
    """``cap``: soft cap of logits if the config has none."""
    return decoder(
        hf_config,
        layers,
        rms(hf_config, offset=1.0),
        usually_tied=True,
        embedding_scale=hidden_size(hf_config) ** 0.5,
        logit_softcap=nullable(hf_config, "final_logit_softcapping", 1e-6, 1e6, cap),
        **switches,
    )


def olmo(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 1: norms without weights; clipped queries, keys and values."""
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=False)
    clip = nullable(hf_config, "clip_qkv", 1e-3, 1e6)
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias", clip_qkv=clip)
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config))


def olmo2(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 2: norms after blocks instead of before; queries and keys normed over all heads."""
    norm = _olmo_norm(hf_config)
    return decoder(hf_config, _post_norm_layer(hf_config, _olmo2(hf_config, positions=2048), norm), norm)


def olmo3(hf_config: HfConfig) -> DecoderSpec:
    """OLMo 3: three of four layers have a sliding window; the others may have another rotation."""
    dim, mixers = head_width(hf_config), {}
    for kind, width in ((FULL, None), (SLIDING, window(hf_config, 4096))):
        rope = rope_spec(hf_config, dim, 2048, theta=500000.0, layer_type=kind, scaled=kind == FULL)
        mixers[kind] = _olmo2(hf_config, rope=rope, window=width)
    kinds = layer_kinds(hf_config, every_full(hf_config, 4))
    norm = _olmo_norm(hf_config)
    return decoder(hf_config, tuple(_post_norm_layer(hf_config, mixers[kind], norm) for kind in kinds), norm)


def flex_olmo(hf_config: HfConfig) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with OLMoE's experts."""
    mixer = _olmo2(hf_config, positions=4096, theta=500000.0)
    choice = routing(hf_config, Scoring.SOFTMAX, 7, 5, renormalise=hf_config.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing=choice, width=expert_width(hf_config, "intermediate_size"))
    norm = _olmo_norm(hf_config)
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
        qk_norm=_olmo_norm(hf_config),
        qk_norm_over=QkNormOver.WHOLE,
        **switches,
    )


def _olmo_norm(hf_config: HfConfig) -> NormSpec:
    return rms(hf_config, 1e-5, rounds_once=True)


def _post_norm_layer(
    hf_config: HfConfig, mixer: AttentionSpec, norm: NormSpec, mlp: FeedForwardSpec | None = None
) -> LayerSpec:
    return normed_layer(Norms(after=norm), mixer, mlp or gated(hf_config))


_GLM_EPS = 1.5625e-7


def glm(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4-9B, GLM-Edge: norms before blocks."""
    return _glm(hf_config, Norms(before=rms(hf_config, _GLM_EPS)), Names())


def glm4(hf_config: HfConfig) -> DecoderSpec:
    """GLM-4-0414: norms before and after blocks."""
    norm = rms(hf_config, _GLM_EPS)
    names = Names(mixer_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    return _glm(hf_config, Norms(before=norm, after=norm), names)


def _glm(hf_config: HfConfig, norms: Norms, names: Names) -> DecoderSpec:
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
    return decoder(hf_config, normed_layer(norms, mixer, mlp), rms(hf_config, _GLM_EPS), names=names)


FAMILIES = {
    "GemmaForCausalLM": Family(gemma, "Gemma 1, CodeGemma"),
    "Gemma2ForCausalLM": Family(gemma2, "Gemma 2"),
    "VaultGemmaForCausalLM": Family(vault_gemma, "VaultGemma"),
    "Gemma3ForCausalLM": Family(gemma3, "Gemma 3, text"),
    "OlmoForCausalLM": Family(olmo, "OLMo 1"),
    "Olmo2ForCausalLM": Family(olmo2, "OLMo 2"),
    "Olmo3ForCausalLM": Family(olmo3, "OLMo 3"),
    "FlexOlmoForCausalLM": Family(flex_olmo, "FlexOlmo 7x7B"),
    "Exaone4ForCausalLM": Family(exaone4, "EXAONE 4"),
    "GlmForCausalLM": Family(glm, "GLM-4-9B, GLM-Edge"),
    "Glm4ForCausalLM": Family(glm4, "GLM-4-0414"),
}
