"""What readers share: how cards spell the sizes of a decoder, and its usual pieces.

Every function takes the defaults of its family: those of the family's configuration class in transformers, for cards that
leave a value out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import Key, ModelCard
from quintet.executor.model_config.experts import ExpertsLayout
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS, POSITIONS, RopeSpec, rope_spec
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    BesideSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MlpLayout,
    MlpSpec,
    NormKind,
    Norms,
    NormSpec,
    QkvLayout,
)
from quintet.executor.model_config.state_specs import DeltaSpec

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
"""Numbers in a row of activations: hidden, intermediate, all heads."""
MAX_VOCAB = 1 << 24
"""Several times the largest of each that there is: beyond, a number is a mistake, and what is counted with it overflows."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
VOCAB = ("vocab_size", "padded_vocab_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num")
WIDTH = "intermediate_size"
RMS_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
APART = "matrices_apart"
"""Of cards that are made of a GGUF file."""
LAYER_EPS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
ACTIVATION = ("hidden_act", "activation_function", "hidden_activation", "activation")

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "quick_gelu": Activation.QUICK_GELU,
}
"""What cards call them."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""What ``layer_types`` calls layers that see everything, and those with a window."""


def hidden_size(card: ModelCard) -> int:
    """Return the width of what goes from layer to layer."""
    return card.whole(HIDDEN, 1, MAX_WIDTH)


def num_layers(card: ModelCard) -> int:
    """Return how many layers there are."""
    return card.whole(LAYERS, 1, MAX_LAYERS)


def num_heads(card: ModelCard) -> int:
    """Return how many query heads there are."""
    return card.whole(HEADS, 1, MAX_HEADS)


def num_kv_heads(card: ModelCard, default: int | None = None) -> int:
    """Return how many KV heads there are: as many as queries have where the card says null, or nothing and no ``default``."""
    heads = num_heads(card)
    stated = card.spelling(KV_HEADS) in card.values  # null, there, means as many as queries have
    count = card.whole(KV_HEADS, 1, MAX_HEADS, heads if stated else default or heads)
    if heads % count:
        raise card.wrong(KV_HEADS, f"a divisor of {card.spelling(HEADS)}, {heads}")
    return count


def head_width(card: ModelCard, default: int | None = None) -> int:
    """Return the numbers of a head: those of the card, else ``default``, else the hidden size's share."""
    heads = num_heads(card)
    width = hidden_size(card)
    if default is None and not card.has("head_dim") and width > heads and width % heads:
        raise card.wrong(HEADS, f"a divisor of {card.spelling(HIDDEN)}, {width}, where there is no head_dim")
    dim = card.whole("head_dim", 1, MAX_HEAD_DIM, default or width // heads)
    if heads * dim > MAX_WIDTH:
        raise card.wrong("head_dim", f"such that {heads} heads have at most {MAX_WIDTH} numbers")
    return dim


def max_positions(card: ModelCard, default: int | None = None) -> int:
    """Return the card's longest context, before any stretching of it."""
    return card.whole(POSITIONS, 1, MAX_POSITIONS, default)


def rotated_numbers(card: ModelCard, head_dim: int, default: int | None = None) -> int | None:
    """Return how many numbers of a head are rotated, for families that count them; None where nobody says."""
    if default is None and not card.has("rotary_dim"):
        return None
    count = card.whole("rotary_dim", 2, head_dim, default)
    if count % 2:
        raise card.wrong("rotary_dim", "an even number")
    return count


def attention(
    card: ModelCard,
    *,
    positions: int | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotated: bool = True,
    **switches: Any,
) -> AttentionSpec:
    """Return attention over all tokens with the card's rotation, if ``rotated``; ``switches`` are fields of `AttentionSpec`.

    ``positions``, ``theta`` and ``share`` (see `rope_spec`), ``kv_heads``, ``head_dim``: the family's, for cards that do not say.
    """
    heads, dim = num_heads(card), head_width(card, head_dim)
    usual: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": num_kv_heads(card, kv_heads),
        "head_dim": dim,
        "value_dim": dim,
        "scale": dim**-0.5,
        "rope": None,
    }
    if rotated and "rope" not in switches:
        usual["rope"] = rope_spec(card, dim, positions or 0, theta=theta, share=share)
    return AttentionSpec(**(usual | switches))


def activation(card: ModelCard, default: str, key: Key = ACTIVATION) -> Activation:
    """Return the feed-forward's nonlinearity."""
    return _ACTIVATIONS[card.word(key, tuple(_ACTIVATIONS), default)]


def gated(
    card: ModelCard, default: str = "silu", key: Key = ACTIVATION, width: int | None = None, **switches: Any
) -> MlpSpec:
    """Return a gated feed-forward; ``default`` and ``key`` are of its activation, ``switches`` fields of `MlpSpec`."""
    wide = card.whole(WIDTH, 1, MAX_WIDTH) if width is None else width
    return MlpSpec(width=wide, **({"activation": activation(card, default, key)} | switches))


def plain(
    card: ModelCard, default: str, key: Key = ACTIVATION, width: int | None = None, **switches: Any
) -> MlpSpec:
    """Return a feed-forward without a gate: ``width``, else the `plain_width` that is told as most families tell it."""
    wide = plain_width(card, WIDTH) if width is None else width
    return MlpSpec(width=wide, activation=activation(card, default, key), gated=False, **switches)


def plain_width(card: ModelCard, key: Key) -> int:
    """Return the width of a feed-forward without a gate: four times the model's where the card does not say.

    ``key``: the family's own spelling. Cards have been seen with another family's beside it, or instead: nobody reads that.
    """
    return card.whole(key, 1, MAX_WIDTH, 4 * hidden_size(card))


def rms(card: ModelCard, default: float = 1e-6, **switches: Any) -> NormSpec:
    """Return an RMS norm with the card's epsilon; ``switches`` are fields of `NormSpec`."""
    return NormSpec(kind=NormKind.RMS, eps=card.real(RMS_EPS, 1e-12, 1.0, default), **switches)


def layer_norm(card: ModelCard, default: float = 1e-5, **switches: Any) -> NormSpec:
    """Return a layer norm with the card's epsilon and, if nothing is said of it, a bias."""
    eps = card.real(LAYER_EPS, 1e-12, 1.0, default)
    usual: dict[str, Any] = {"kind": NormKind.LAYER, "eps": eps, "biased": True}
    return NormSpec(**(usual | switches))


def alibi_slopes(count: int, octaves: float = 8.0) -> tuple[float, ...]:
    """Return the slopes of so many heads.

    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input length extrapolation", 2022:
    of a power of two heads they are a geometric series that ends at 2^-octaves; of another number, those of the power of two
    below and then every other one of the power above.
    """
    below = 1 << (count.bit_length() - 1)

    def series(of: int) -> list[float]:
        return [2.0 ** (-octaves * (index + 1) / of) for index in range(of)]

    return tuple((series(below) + series(2 * below)[0::2])[:count])


def pre_norm(norm: NormSpec, mixer: MixerSpec, mlp: FeedForwardSpec, **switches: Any) -> LayerSpec:
    """Return a layer with a norm before its mixer and one before its feed-forward; ``switches`` are of `LayerSpec`."""
    return LayerSpec(
        mixer=mixer, mlp=mlp, mixer_norms=Norms(before=norm), mlp_norms=Norms(before=norm), **switches
    )


def side_by_side(norm: NormSpec, mixer: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    """Return a layer whose mixer and feed-forward read the same norm."""
    return LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=Norms(before=norm), mlp_norms=Norms(), parallel=True)


def factor(card: ModelCard, key: str, default: float = 1.0) -> float:
    """Return what something is multiplied by, or divided."""
    return card.real(key, 1e-6, 1e6, default)


def refuse(card: ModelCard, key: str) -> None:
    """Refuse a card with a switch on that makes another kind of model of it."""
    if card.flag(key, False):
        raise card.wrong(key, "false: with it, this is no decoder of text alone")


def nullable(
    card: ModelCard, key: str, least: float, most: float, default: float | None = None
) -> float | None:
    """Return a number: None where the card says null, ``default`` where it does not say."""
    if not card.has(key) and (key in card.values or default is None):
        return None
    return card.real(key, least, most, default)


def window(card: ModelCard, default: int | None = None, key: str = "sliding_window") -> int | None:
    """Return the card's sliding window, or chunk: None where it says null, ``default`` where it does not say."""
    if not card.has(key) and (key in card.values or default is None):
        return None
    return card.whole(key, 1, MAX_POSITIONS, default)


def every_full(card: ModelCard, period: int) -> list[str]:
    """Return each layer's kind: the last of every ``period`` layers sees everything, the others slide."""
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers(card))]


def layer_kinds(card: ModelCard, usual: list[str]) -> list[str]:
    """Return each layer's kind, `FULL` or `SLIDING`: ``usual`` where the card does not list them."""
    return layer_types(card, (FULL, SLIDING)) if card.has("layer_types") else usual


def layer_types(card: ModelCard, known: Sequence[str]) -> list[str]:
    """Return each layer's kind, one of those known, as the card lists it."""
    kinds, count = card.values.get("layer_types"), num_layers(card)
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise card.wrong("layer_types", f"a list of {count} words, each {' or '.join(known)}")
    return kinds


def rotated_layers(card: ModelCard) -> list[bool]:
    """Return whether each layer is rotated: ``no_rope_layers`` has a 0 for each that is not; where the list is absent or empty,
    the last of every ``no_rope_layer_interval`` is not."""
    count, flags = num_layers(card), card.values.get("no_rope_layers")
    if flags is None or flags == []:
        interval = card.whole("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(flags, list) or len(flags) != count or not all(flag in (0, 1) for flag in flags):
        raise card.wrong("no_rope_layers", f"a list of {count} numbers, each 0 (not rotated) or 1")
    return [bool(flag) for flag in flags]


def layered_windows(card: ModelCard) -> tuple[int | None, ...]:
    """Return each layer's window by Qwen's rule: layers from ``max_window_layers`` on slide, if ``use_sliding_window``;
    ``layer_types`` may say otherwise."""
    width = window(card, 4096) if card.flag("use_sliding_window", False) else None
    if width is None:
        return (None,) * num_layers(card)
    if card.has("layer_types"):
        kinds = layer_types(card, (FULL, SLIDING))
        return tuple(width if kind == SLIDING else None for kind in kinds)
    first = card.whole("max_window_layers", 0, MAX_LAYERS, 28)
    return tuple(width if layer >= first else None for layer in range(num_layers(card)))


def windowed(layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
    """Return the layer once for each window."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec), mixer
    return tuple(replace(layer, mixer=replace(mixer, window=each)) for each in windows)


def rotated_reach(card: ModelCard, ropes: Iterable[RopeSpec | None]) -> int:
    """Return how far the rotation of any layer reaches; where none rotates, the card's number of positions."""
    reaches = [rope.reach for rope in ropes if rope is not None]
    return max(reaches) if reaches else max_positions(card)


def decoder(
    card: ModelCard,
    layers: Sequence[LayerSpec],
    final_norm: NormSpec | None,
    predictors: int = 0,
    **switches: Any,
) -> DecoderSpec:
    """Return the whole; ``switches`` are fields of `DecoderSpec`. The card's ``tie_word_embeddings`` is false if absent.

    It reaches as far as learned positions or the rotation of any layer do, unless ``reach`` says otherwise.
    ``predictors``: how many layers behind the last one, which predict further tokens and are not read, a checkpoint may have,
    whatever the card says; it may say more.
    """
    usual: dict[str, Any] = {
        "vocab_size": card.whole(VOCAB, 1, MAX_VOCAB),
        "hidden_size": hidden_size(card),
        "layers": tuple(layers),
        "final_norm": final_norm,
        "tied": card.flag("tie_word_embeddings", False),
    }
    if switches.get("positions") is not None:
        usual["reach"] = switches["positions"].count
    elif "reach" not in switches:
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        usual["reach"] = rotated_reach(card, [each.rope for each in attentions])
    count, names = card.whole(PREDICTORS, 0, MAX_LAYERS, predictors), switches.get("names", Names())
    unread = (names.in_layer(num_layers(card) + i, "*") for i in range(max(predictors, count)))
    spec = DecoderSpec(**(usual | switches | {"names": replace(names, ignored=(*names.ignored, *unread))}))
    return _apart(spec) if card.flag(APART, False) else spec


def _apart(spec: DecoderSpec) -> DecoderSpec:
    """Return the same of a checkpoint that has each matrix by itself, ``[out, in]``, whatever the family's own stack."""
    return replace(spec, transposed=False, layers=tuple(map(_with_matrices_apart, spec.layers)))


def _with_matrices_apart(layer: LayerSpec) -> LayerSpec:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, layout=QkvLayout.SEPARATE)
    elif isinstance(mixer, BesideSpec):
        mixer = replace(mixer, attention=replace(mixer.attention, layout=QkvLayout.SEPARATE))
    elif isinstance(mixer, DeltaSpec):
        mixer = replace(mixer, by_head=False)
    if isinstance(mlp, MlpSpec):
        mlp = replace(mlp, layout=MlpLayout.SEPARATE)
    elif mlp is not None:
        mlp = replace(mlp, layout=ExpertsLayout.SEPARATE, shared_stacked=False)
    return replace(layer, mixer=mixer, mlp=mlp)
