"""Gemma 1, 2 and 3 (text): scaled embeddings, norm weights with offset 1, norms before and after blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    FULL,
    SLIDING,
    attention,
    decoder,
    every_full,
    gated,
    head_width,
    hidden_size,
    layer_kinds,
    nullable,
    pre_norm,
    refuse,
    rms,
    window,
    windowed,
)
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    Norms,
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
    mixer = _attention(hf_config, positions=8192)
    layer = pre_norm(rms(hf_config, offset=1.0), mixer, _mlp(hf_config))
    return _decoder(hf_config, layer)


def gemma2(hf_config: HfConfig) -> DecoderSpec:
    """Gemma 2: soft caps of scores and logits; every other layer has a sliding window."""
    mixer, width = _capped(hf_config, positions=8192), window(hf_config, 4096)
    kinds = layer_kinds(hf_config, every_full(hf_config, 2))
    layers = (_layer(hf_config, replace(mixer, window=width if kind == SLIDING else None)) for kind in kinds)
    return _decoder(hf_config, tuple(layers), cap=30.0, names=Names(mlp_norm="pre_feedforward_layernorm"))


def vault_gemma(hf_config: HfConfig) -> DecoderSpec:
    """VaultGemma: Gemma 2 without the norms after blocks."""
    mixer = _capped(hf_config, positions=8192)
    width = window(hf_config, 4096)
    norm = rms(hf_config, offset=1.0)
    kinds = layer_kinds(hf_config, every_full(hf_config, 2))
    layer = pre_norm(norm, mixer, _mlp(hf_config))
    layers = windowed(layer, (width if kind == SLIDING else None for kind in kinds))
    return _decoder(hf_config, layers, cap=30.0, names=Names(mlp_norm="pre_feedforward_layernorm"))


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
    layers = (_layer(hf_config, sliding if kind == SLIDING else mixer) for kind in kinds)
    names = Names(mlp_norm="pre_feedforward_layernorm")
    return _decoder(hf_config, tuple(layers), names=names, reach=full.max_positions)


def _attention(hf_config: HfConfig, **switches: Any) -> AttentionSpec:
    refuse(hf_config, "use_bidirectional_attention")
    return attention(hf_config, head_dim=256, bias_key="attention_bias", **switches)


def _mlp(hf_config: HfConfig) -> MlpSpec:
    """Return the feed-forward; Gemma's first configs write ``gelu`` for its tanh approximation."""
    return replace(gated(hf_config, "gelu_pytorch_tanh"), activation=Activation.GELU_TANH)


def _capped(hf_config: HfConfig, default: float | None = 50.0, **switches: Any) -> AttentionSpec:
    """``default``: the cap if the config has none."""
    return _attention(
        hf_config,
        kv_heads=4,
        scale=hf_config.real("query_pre_attn_scalar", 1e-6, 1e6, 256) ** -0.5,
        softcap=nullable(hf_config, "attn_logit_softcapping", 1e-6, 1e6, default),
        **switches,
    )


def _layer(hf_config: HfConfig, mixer: AttentionSpec) -> LayerSpec:
    norm = rms(hf_config, offset=1.0)
    norms = Norms(before=norm, after=norm)
    return LayerSpec(mixer=mixer, mlp=_mlp(hf_config), mixer_norms=norms, mlp_norms=norms)


def _decoder(
    hf_config: HfConfig, layers: LayerSpec | Sequence[LayerSpec], cap: float | None = None, **switches: Any
) -> DecoderSpec:
    """``cap``: soft cap of logits if the config has none."""
    return decoder(
        hf_config,
        layers,
        rms(hf_config, offset=1.0),
        tied=hf_config.flag("tie_word_embeddings", True),
        embedding_scale=hidden_size(hf_config) ** 0.5,
        logit_softcap=nullable(hf_config, "final_logit_softcapping", 1e-6, 1e6, cap),
        **switches,
    )


FAMILIES = {
    "GemmaForCausalLM": Family(gemma, "Gemma 1, CodeGemma"),
    "Gemma2ForCausalLM": Family(gemma2, "Gemma 2"),
    "VaultGemmaForCausalLM": Family(vault_gemma, "VaultGemma"),
    "Gemma3ForCausalLM": Family(gemma3, "Gemma 3, text"),
}
