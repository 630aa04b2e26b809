"""Model families of the decoder's shape: from each one's ``config.json`` to a `DecoderSpec`.

Defaults are those of the family's configuration class in transformers, for cards that leave a value out.
"""

from __future__ import annotations

from typing import Any

from quintet.executor.layers.rope import rope_spec
from quintet.executor.models.decoder import Decoder, DecoderSpec
from quintet.executor.models.model import ModelCard, Setting
from quintet.wire.errors import ConfigError


def llama(card: ModelCard, setting: Setting) -> Decoder:
    """Llama 1, 2 and 3, CodeLlama, Vicuna."""
    biased = bool(card.values.get("attention_bias", False))
    mlp_biased = bool(card.values.get("mlp_bias", False))
    return _decoder(
        card, setting, max_positions=2048, qkv_bias=biased, output_bias=biased, mlp_bias=mlp_biased
    )


def mistral(card: ModelCard, setting: Setting) -> Decoder:
    """Mistral: every layer has the card's sliding window, if any."""
    num_layers = _number(card, "num_hidden_layers")
    window = card.values.get("sliding_window", 4096)
    return _decoder(card, setting, max_positions=131072, kv_heads=8, windows=(window,) * num_layers)


def qwen2(card: ModelCard, setting: Setting) -> Decoder:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    return _decoder(card, setting, max_positions=32768, windows=_layered_windows(card), qkv_bias=True)


def qwen3(card: ModelCard, setting: Setting) -> Decoder:
    """Qwen3: normalised queries and keys, explicit head width."""
    biased = bool(card.values.get("attention_bias", False))
    return _decoder(
        card,
        setting,
        max_positions=32768,
        head_dim=128,
        windows=_layered_windows(card),
        qk_norm=True,
        qkv_bias=biased,
        output_bias=biased,
    )


def _decoder(
    card: ModelCard,
    setting: Setting,
    *,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    **switches: bool,
) -> Decoder:
    values = card.values
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{card.path}: hidden_act is {values['hidden_act']!r}; this architecture supports 'silu'"
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"{card.path}: the weights are quantized ({method}), which is not supported; use the original checkpoint"
        )
    hidden, heads = _number(card, "hidden_size"), _number(card, "num_attention_heads")
    dim = values.get("head_dim") or head_dim or hidden // heads
    positions = values.get("max_position_embeddings") or max_positions
    spec = DecoderSpec(
        vocab_size=_number(card, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(card, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or kv_heads or heads,
        head_dim=dim,
        rms_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope_spec(values, dim, positions, card.path),
        windows=windows or (None,) * _number(card, "num_hidden_layers"),
        tied=bool(values.get("tie_word_embeddings", False)),
        **switches,
    )
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{card.path}: num_attention_heads is {spec.num_heads}; it must be a multiple of"
            f" num_key_value_heads, {spec.num_kv_heads}"
        )
    return Decoder(spec, setting)


def _layered_windows(card: ModelCard) -> tuple[int | None, ...]:
    """Qwen's rule: layers from ``max_window_layers`` on slide, if ``use_sliding_window``; ``layer_types`` may say otherwise."""
    values, num_layers = card.values, _number(card, "num_hidden_layers")
    window: int | None = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    if window is None:
        return (None,) * num_layers
    kinds: list[str] | None = values.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = values.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _number(card: ModelCard, key: str) -> int:
    value: Any = card.values.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{card.path}: {key} is {value!r}; it must be a positive integer")
    return value
