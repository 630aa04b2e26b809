"""Model families of the decoder's shape: from each one's ``config.json`` to a `DecoderSpec`.

Defaults are those of the family's configuration class in transformers, for cards that leave a value out. Imports no torch: who
resolves a configuration and who builds the model read a card with the same function.
"""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.rope import MAX_POSITIONS, rope_spec
from quintet.executor.cards.spec import DecoderSpec
from quintet.wire.errors import ConfigError

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
"""Numbers in a row of activations: hidden, intermediate, all heads."""
MAX_VOCAB = 1 << 24
"""Several times the largest of each that there is: beyond, a number is a mistake, and what is counted with it overflows."""


def llama(card: ModelCard) -> DecoderSpec:
    """Llama 1, 2 and 3, CodeLlama, Vicuna."""
    biased = card.flag("attention_bias", False)
    return _decoder(
        card, max_positions=2048, qkv_bias=biased, output_bias=biased, mlp_bias=card.flag("mlp_bias", False)
    )


def mistral(card: ModelCard) -> DecoderSpec:
    """Mistral: every layer has the card's sliding window, if any."""
    return _decoder(card, max_positions=131072, kv_heads=8, windows=(_window(card),) * _num_layers(card))


def qwen2(card: ModelCard) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    return _decoder(card, max_positions=32768, windows=_layered_windows(card), qkv_bias=True)


def qwen3(card: ModelCard) -> DecoderSpec:
    """Qwen3: normalised queries and keys, explicit head width."""
    biased = card.flag("attention_bias", False)
    return _decoder(
        card,
        max_positions=32768,
        head_dim=128,
        windows=_layered_windows(card),
        qk_norm=True,
        qkv_bias=biased,
        output_bias=biased,
    )


FAMILIES: dict[str, Callable[[ModelCard], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "LLaMAForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
"""By the card's architecture."""


def _decoder(
    card: ModelCard,
    *,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    **switches: bool,
) -> DecoderSpec:
    card.word("hidden_act", ("silu",), "silu")
    if card.has("quantization_config"):
        method = card.section("quantization_config").values.get("quant_method", "unknown")
        raise ConfigError(
            f"{card.path}: the weights are quantized ({method!r:.40}), which is not supported; use the original checkpoint"
        )
    hidden = card.whole("hidden_size", 1, MAX_WIDTH)
    heads = card.whole("num_attention_heads", 1, MAX_HEADS)
    stated = "num_key_value_heads" in card.values  # null, there, means as many as queries have
    num_kv_heads = card.whole("num_key_value_heads", 1, MAX_HEADS, heads if stated else kv_heads or heads)
    if heads % num_kv_heads:
        raise card.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    dim = card.whole("head_dim", 1, MAX_HEAD_DIM, head_dim or hidden // heads)
    if heads * dim > MAX_WIDTH:
        raise card.wrong("head_dim", f"such that {heads} heads have at most {MAX_WIDTH} numbers")
    return DecoderSpec(
        vocab_size=card.whole("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=card.whole("intermediate_size", 1, MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        rms_eps=card.real("rms_norm_eps", 1e-12, 1.0, 1e-6),
        rope=rope_spec(card, dim, max_positions),
        windows=windows or (None,) * _num_layers(card),
        tied=card.flag("tie_word_embeddings", False),
        **switches,
    )


def _num_layers(card: ModelCard) -> int:
    return card.whole("num_hidden_layers", 1, MAX_LAYERS)


def _window(card: ModelCard) -> int | None:
    """The card's sliding window: null for none, 4096 where the card does not say."""
    if "sliding_window" in card.values and not card.has("sliding_window"):
        return None
    return card.whole("sliding_window", 1, MAX_POSITIONS, 4096)


def _layered_windows(card: ModelCard) -> tuple[int | None, ...]:
    """Qwen's rule: layers from ``max_window_layers`` on slide, if ``use_sliding_window``; ``layer_types`` may say otherwise."""
    num_layers = _num_layers(card)
    window = _window(card) if card.flag("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    if card.has("layer_types"):
        kinds, known = card.values["layer_types"], ("full_attention", "sliding_attention")
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(kind in known for kind in kinds)
        ):
            raise card.wrong("layer_types", f"a list of {num_layers} words, each {' or '.join(known)}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = card.whole("max_window_layers", 0, MAX_LAYERS, 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))
