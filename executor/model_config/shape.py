"""Common parts of config readers: registry entries, keys of a decoder's sizes, and usual building blocks.

Readers take the family's defaults, those of its configuration class in transformers, for values missing in a
config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.hf_config import HfConfig, Key
from quintet.executor.model_config.names import OTHER_PARTS, Names
from quintet.executor.model_config.rope import MAX_POSITIONS, POSITIONS, RopeSpec, rope_spec
from quintet.executor.model_config.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MlpLayout,
    MlpSpec,
    ModelSpec,
    NormKind,
    Norms,
    NormSpec,
    ParallelMixerSpec,
    QkvLayout,
)
from quintet.executor.model_config.state_specs import DeltaSpec

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 20
"""Elements in a row of activations: hidden, intermediate, or all heads."""
MAX_VOCAB = 1 << 24
"""Limits several times above any existing model: larger values are errors, and would overflow size computations."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
VOCAB = ("vocab_size", "padded_vocab_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num")
WIDTH = "intermediate_size"
RMS_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
SEPARATE_MATRICES = "matrices_apart"
"""Key of configs converted from GGUF: matrices are separate."""
STACKED_EXPERTS = "stacked_experts"
"""Key of configs of checkpoints with one tensor of all experts, where the family has a tensor for each expert."""
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
"""Activations by their names in configs."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names in ``layer_types`` of layers with full attention and with a sliding window."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its config reader and its model builder."""

    read: Callable[[HfConfig], ModelSpec]
    """Returns the spec of a config. Raises `ConfigError` that names an invalid value."""
    words: str
    """Model names, for users."""
    builder: str = "quintet.executor.models.decoder:Decoder"
    """``module:name`` of the function that builds the model from a spec and a `quintet.executor.models.model.Setting`."""


def hidden_size(hf_config: HfConfig) -> int:
    """Return the width of the residual stream."""
    return hf_config.whole(HIDDEN, 1, MAX_WIDTH)


def num_layers(hf_config: HfConfig) -> int:
    """Return the number of layers."""
    return hf_config.whole(LAYERS, 1, MAX_LAYERS)


def num_heads(hf_config: HfConfig) -> int:
    """Return the number of query heads."""
    return hf_config.whole(HEADS, 1, MAX_HEADS)


def num_kv_heads(hf_config: HfConfig, default: int | None = None) -> int:
    """Return the number of KV heads: as many as query heads for null, or if absent without ``default``."""
    heads = num_heads(hf_config)
    stated = hf_config.spelling(KV_HEADS) in hf_config.values  # null means as many as query heads
    count = hf_config.whole(KV_HEADS, 1, MAX_HEADS, heads if stated else default or heads)
    if heads % count:
        raise hf_config.wrong(KV_HEADS, f"a divisor of {hf_config.spelling(HEADS)}, {heads}")
    return count


def head_width(hf_config: HfConfig, default: int | None = None) -> int:
    """Return the head width: the config's, else ``default``, else hidden size divided by heads."""
    heads = num_heads(hf_config)
    width = hidden_size(hf_config)
    if default is None and not hf_config.has("head_dim") and width > heads and width % heads:
        raise hf_config.wrong(
            HEADS, f"a divisor of {hf_config.spelling(HIDDEN)}, {width}, if head_dim is absent"
        )
    dim = hf_config.whole("head_dim", 1, MAX_HEAD_DIM, default or width // heads)
    if heads * dim > MAX_WIDTH:
        raise hf_config.wrong(
            "head_dim", f"a width with which {heads} heads have at most {MAX_WIDTH} elements"
        )
    return dim


def max_positions(hf_config: HfConfig, default: int | None = None) -> int:
    """Return the config's maximum context length before scaling."""
    return hf_config.whole(POSITIONS, 1, MAX_POSITIONS, default)


def rotated_numbers(hf_config: HfConfig, head_dim: int, default: int | None = None) -> int | None:
    """Return the number of rotated elements of a head, for families that count them; None if absent without default."""
    if default is None and not hf_config.has("rotary_dim"):
        return None
    count = hf_config.whole("rotary_dim", 2, head_dim, default)
    if count % 2:
        raise hf_config.wrong("rotary_dim", "an even number")
    return count


def attention(
    hf_config: HfConfig,
    *,
    positions: int | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotated: bool = True,
    biased: bool = False,
    bias_key: str | None = None,
    **switches: Any,
) -> AttentionSpec:
    """Return full attention with the config's rotation, if ``rotated``; ``switches`` are fields of `AttentionSpec`.

    ``positions``, ``theta`` and ``share`` (see `rope_spec`), ``kv_heads``, ``head_dim``: the family's defaults. ``biased``:
    all projections have biases; ``bias_key``: the config's flag for them, by default false.
    """
    heads, dim = num_heads(hf_config), head_width(hf_config, head_dim)
    usual: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": num_kv_heads(hf_config, kv_heads),
        "head_dim": dim,
        "value_dim": dim,
        "scale": dim**-0.5,
        "rope": None,
    }
    usual["qkv_bias"] = usual["output_bias"] = biased if bias_key is None else hf_config.flag(bias_key, False)
    if rotated and "rope" not in switches:
        usual["rope"] = rope_spec(hf_config, dim, positions or 0, theta=theta, share=share)
    return AttentionSpec(**(usual | switches))


def activation(hf_config: HfConfig, default: str, key: Key = ACTIVATION) -> Activation:
    """Return the feed-forward's activation."""
    return _ACTIVATIONS[hf_config.word(key, tuple(_ACTIVATIONS), default)]


def gated(
    hf_config: HfConfig,
    default: str = "silu",
    key: Key = ACTIVATION,
    width: int | None = None,
    **switches: Any,
) -> MlpSpec:
    """Return a gated feed-forward. ``default`` and ``key``: of its activation; ``switches``: fields of `MlpSpec`."""
    wide = hf_config.whole(WIDTH, 1, MAX_WIDTH) if width is None else width
    return MlpSpec(width=wide, **({"activation": activation(hf_config, default, key)} | switches))


def plain(
    hf_config: HfConfig, default: str, key: Key = ACTIVATION, width: int | None = None, **switches: Any
) -> MlpSpec:
    """Return a feed-forward without a gate, of ``width`` or of the `plain_width` under the usual key."""
    wide = plain_width(hf_config, WIDTH) if width is None else width
    return MlpSpec(width=wide, activation=activation(hf_config, default, key), gated=False, **switches)


def plain_width(hf_config: HfConfig, key: Key) -> int:
    """Return the width of a feed-forward without a gate: by default four times the hidden size.

    ``key``: the family's own key. Some configs also have another family's key, which is ignored.
    """
    return hf_config.whole(key, 1, MAX_WIDTH, 4 * hidden_size(hf_config))


def rms(hf_config: HfConfig, default: float = 1e-6, **switches: Any) -> NormSpec:
    """Return an RMS norm with the config's epsilon; ``switches`` are fields of `NormSpec`."""
    return NormSpec(kind=NormKind.RMS, eps=hf_config.real(RMS_EPS, 1e-12, 1.0, default), **switches)


def layer_norm(hf_config: HfConfig, default: float = 1e-5, **switches: Any) -> NormSpec:
    """Return a layer norm with the config's epsilon and, by default, a bias."""
    eps = hf_config.real(LAYER_EPS, 1e-12, 1.0, default)
    usual: dict[str, Any] = {"kind": NormKind.LAYER, "eps": eps, "biased": True}
    return NormSpec(**(usual | switches))


def normed_layer(norms: Norms, mixer: MixerSpec, mlp: FeedForwardSpec, **switches: Any) -> LayerSpec:
    """Return a layer with equal norms around its mixer and its feed-forward; ``switches`` are fields of `LayerSpec`."""
    return LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=norms, mlp_norms=norms, **switches)


def pre_norm(norm: NormSpec, mixer: MixerSpec, mlp: FeedForwardSpec, **switches: Any) -> LayerSpec:
    """Return a layer with norms before its mixer and its feed-forward; ``switches`` are fields of `LayerSpec`."""
    return normed_layer(Norms(before=norm), mixer, mlp, **switches)


def side_by_side(norm: NormSpec, mixer: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    """Return a parallel layer: mixer and feed-forward read the same norm."""
    return LayerSpec(mixer=mixer, mlp=mlp, mixer_norms=Norms(before=norm), parallel=True)


def factor(hf_config: HfConfig, key: str, default: float = 1.0) -> float:
    """Return a multiplier or divisor."""
    return hf_config.real(key, 1e-6, 1e6, default)


def refuse(hf_config: HfConfig, key: str) -> None:
    """Reject a config with a switch that makes it another kind of model."""
    if hf_config.flag(key, False):
        raise hf_config.wrong(key, "false: otherwise the model is not a text-only decoder")


def nullable(
    hf_config: HfConfig, key: str, least: float, most: float, default: float | None = None
) -> float | None:
    """Return a number: None for null, ``default`` if absent."""
    if not hf_config.has(key) and (key in hf_config.values or default is None):
        return None
    return hf_config.real(key, least, most, default)


def window(hf_config: HfConfig, default: int | None = None, key: str = "sliding_window") -> int | None:
    """Return the config's sliding window or chunk length: None for null, ``default`` if absent."""
    if not hf_config.has(key) and (key in hf_config.values or default is None):
        return None
    return hf_config.whole(key, 1, MAX_POSITIONS, default)


def every_full(hf_config: HfConfig, period: int) -> list[str]:
    """Return each layer's kind: full attention in the last of every ``period`` layers, a sliding window in the others."""
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers(hf_config))]


def layer_kinds(hf_config: HfConfig, usual: list[str], known: Sequence[str] = (FULL, SLIDING)) -> list[str]:
    """Return each layer's kind, one of ``known``; ``usual`` if the config does not list them."""
    return layer_types(hf_config, known) if hf_config.has("layer_types") else usual


def windows_by_kind(hf_config: HfConfig, width: int | None, usual: list[str]) -> list[int | None]:
    """Return each layer's sliding window: ``width`` for kind `SLIDING`; ``usual``: see `layer_kinds`."""
    return [width if kind == SLIDING else None for kind in layer_kinds(hf_config, usual)]


def layer_types(hf_config: HfConfig, known: Sequence[str], key: str = "layer_types") -> list[str]:
    """Return each layer's kind from the config's list. Raises `ConfigError` for kinds not in ``known``.

    Entries after the last layer are ignored: multi-token prediction layers, or layers that an override removed.
    """
    listed, count = hf_config.values.get(key), num_layers(hf_config)
    kinds = listed[:count] if isinstance(listed, list) else []
    if len(kinds) < count or not all(kind in known for kind in kinds):
        raise hf_config.wrong(key, f"a list of {count} words, each {' or '.join(known)}")
    return kinds


def last_sliding(hf_config: HfConfig, default: int) -> list[str]:
    """Return each layer's kind: `SLIDING` from layer ``max_window_layers`` on, by default ``default``."""
    first = hf_config.whole("max_window_layers", 0, MAX_LAYERS, default)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers(hf_config))]


def qwen_windows(hf_config: HfConfig) -> list[int | None]:
    """Return each layer's sliding window by Qwen's rule: the last layers have one if ``use_sliding_window``."""
    width = window(hf_config, 4096) if hf_config.flag("use_sliding_window", False) else None
    if width is None:
        return [None] * num_layers(hf_config)
    return windows_by_kind(hf_config, width, last_sliding(hf_config, 28))


def windowed(layers: LayerSpec | Iterable[LayerSpec], windows: Sequence[int | None]) -> list[LayerSpec]:
    """Return copies of a layer, or of different layers, each with its window."""
    layers = [layers] * len(windows) if isinstance(layers, LayerSpec) else layers
    return [_windowed(layer, each) for layer, each in zip(layers, windows, strict=True)]


def _windowed(layer: LayerSpec, width: int | None) -> LayerSpec:
    assert isinstance(layer.mixer, AttentionSpec), layer.mixer
    return replace(layer, mixer=replace(layer.mixer, window=width))


def rotated_reach(hf_config: HfConfig, ropes: Iterable[RopeSpec | None]) -> int:
    """Return the maximum context length of all rotations; without rotation, the config's number of positions."""
    reaches = [rope.reach for rope in ropes if rope is not None]
    return max(reaches) if reaches else max_positions(hf_config)


def decoder(
    hf_config: HfConfig,
    layers: LayerSpec | Sequence[LayerSpec],
    final_norm: NormSpec | None,
    predictors: int = 0,
    usually_tied: bool = False,
    **switches: Any,
) -> DecoderSpec:
    """Return the decoder of equal or different layers; ``switches`` are fields of `DecoderSpec`.

    ``usually_tied``: default of ``tie_word_embeddings``.

    The context length follows from learned positions or rotations, unless ``reach`` is given. ``predictors``: number
    of multi-token prediction layers after the last one that a checkpoint may have; they are not loaded. The config may
    state more.
    """
    layers = (layers,) * num_layers(hf_config) if isinstance(layers, LayerSpec) else tuple(layers)
    usual: dict[str, Any] = {
        "vocab_size": hf_config.whole(VOCAB, 1, MAX_VOCAB),
        "hidden_size": hidden_size(hf_config),
        "layers": layers,
        "final_norm": final_norm,
        "tied": hf_config.flag("tie_word_embeddings", usually_tied),
    }
    if switches.get("positions") is not None:
        usual["reach"] = switches["positions"].count
    elif "reach" not in switches:
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        usual["reach"] = rotated_reach(hf_config, [each.rope for each in attentions])
    count, names = hf_config.whole(PREDICTORS, 0, MAX_LAYERS, predictors), switches.get("names", Names())
    unread = (names.in_layer(num_layers(hf_config) + i, "*") for i in range(max(predictors, count)))
    names = replace(names, ignored=(*names.ignored, *OTHER_PARTS, *unread))
    spec = DecoderSpec(**(usual | switches | {"names": names}))
    if hf_config.flag(STACKED_EXPERTS, False):
        spec = replace(spec, layers=tuple(map(_with_stacked_experts, spec.layers)))
    if hf_config.flag(SEPARATE_MATRICES, False):
        spec = replace(spec, transposed=False, layers=tuple(map(_with_separate_matrices, spec.layers)))
    return spec


def pre_norm_decoder(
    hf_config: HfConfig, norm: NormSpec, mixer: MixerSpec, mlp: FeedForwardSpec, **switches: Any
) -> DecoderSpec:
    """Return a decoder of equal layers, with ``norm`` before each block and after the last; ``switches``: see `decoder`."""
    return decoder(hf_config, pre_norm(norm, mixer, mlp), norm, **switches)


def _with_stacked_experts(layer: LayerSpec) -> LayerSpec:
    mlp = layer.mlp
    if not isinstance(mlp, ExpertsSpec) or mlp.layout is not ExpertsLayout.SEPARATE:
        return layer
    return replace(layer, mlp=replace(mlp, layout=ExpertsLayout.STACKED))


def _with_separate_matrices(layer: LayerSpec) -> LayerSpec:
    """Return the layer for a checkpoint with separate matrices, instead of the family's stacked ones."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, layout=QkvLayout.SEPARATE)
    elif isinstance(mixer, ParallelMixerSpec):
        mixer = replace(mixer, attention=replace(mixer.attention, layout=QkvLayout.SEPARATE))
    elif isinstance(mixer, DeltaSpec):
        mixer = replace(mixer, by_head=False)
    if isinstance(mlp, MlpSpec):
        mlp = replace(mlp, layout=MlpLayout.SEPARATE)
    elif mlp is not None:
        mlp = replace(mlp, layout=ExpertsLayout.SEPARATE, shared_stacked=False)
    return replace(layer, mixer=mixer, mlp=mlp)
