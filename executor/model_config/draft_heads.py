"""Configs of draft heads, which propose drafts from hidden states of the served model: EAGLE and Medusa, and the registry.

EAGLE draft heads: one layer over the hidden states of the served model (Li et al., "EAGLE", 2024, and "EAGLE-3", 2025).

Two formats of the ``config.json`` exist: that of the authors, and that of the library ``speculators``, with the layer's values in
``transformer_layer_config``. `eagle3_hf_config` and `eagle_hf_config` convert both into one config.

A head of EAGLE or EAGLE-2 is a decoder layer like one for multi-token prediction, without norms around it. Its
embedding and output layer are the served model's; copies of them in a checkpoint are not read. `eagle_hf_config` also converts
the format of vLLM with the layer's values in ``model``.

Medusa heads (Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads", 2024).

Head ``i`` reads the hidden state of a token, and proposes the token ``i + 2`` places after it. Many configurations lack
sizes, or have another number of heads than the checkpoint. So `medusa_hf_config` takes all sizes from the tensors, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, takewhile
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.mtp import ARCHITECTURE as MTP
from quintet.executor.model_config.mtp import MtpNames, MtpSpec, read_mtp
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    HIDDEN,
    LAYERS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    VOCAB,
    Family,
    attention,
    decoder,
    gated,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, Norms
from quintet.wire.config import MAX_DRAFTS

EAGLE, EAGLE_3, MEDUSA = "EagleSpeculator", "Eagle3Speculator", "MedusaHeads"
"""Architectures."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYER_KEYS = "transformer_layer_config"
_LAYER_CLASSES = ("LlamaDecoderLayer", "Qwen2DecoderLayer")
"""Classes of a head's layer in configs of the library."""
_OWN_EMBEDDING, _TOKEN_MAP, _LAYER_NAME = "own_embedding", "token_map", "layer_name"
_FC_BIAS, _QKV_BIAS = "fc_bias", "qkv_bias"
"""Keys of the converted config: whether the checkpoint has these tensors, and its name of the layer."""
_EAGLE_NAMES = {
    layer: MtpNames(f"model.{layer}", None, None, f"model.{fc}", output_norm=None, has_output_norm=False)
    for layer, fc in (("layers.0", "fc"), ("transformer", "fusion_fc"))
}
"""By name of the layer: of the authors, and of the library."""


@dataclass(frozen=True, slots=True)
class EagleSpec(DecoderSpec):
    """A head of EAGLE-3. ``vocab_size`` is that of the served model."""

    draft_vocab_size: int = 0
    """Tokens that the head can propose."""
    target_hidden_size: int = 0
    aux_layers: tuple[int, ...] = ()
    """Numbers of layers of the served model, ascending, after which its hidden states are read; 0: the embeddings."""
    norm_before_residual: bool = False
    """The residual is the normed hidden state."""
    norm_before_fc: bool = False
    """The concatenated hidden states of the served model are normed."""
    has_embedding: bool = False
    """Otherwise the head uses the served model's embedding."""
    has_token_map: bool = False
    """Otherwise token ids of the head are those of the served model."""


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that heads without a list in their config were trained with."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def eagle_hf_config(config: Mapping[str, Any], tensors: Collection[str], num_layers: int) -> dict[str, Any]:
    """Return the config of a head of EAGLE or EAGLE-2. tensors: names in its checkpoint. num_layers: of the served model."""
    names = {name.removeprefix("model.") for name in tensors}
    is_of_library = _LAYER_KEYS in config
    nested = config.get(_LAYER_KEYS if is_of_library else "model")
    layer, fc = ("transformer", "fusion_fc") if is_of_library else ("layers.0", "fc")
    return {
        **(nested if isinstance(nested, dict) else {}),
        **{key: value for key, value in config.items() if value is not None},
        **({LAYERS[0]: 1} if is_of_library else {}),  # may be that of the served model
        "architectures": [EAGLE],
        AUX_LAYERS: [num_layers],
        _LAYER_NAME: layer,
        _FC_BIAS: f"{fc}.bias" in names,
        _QKV_BIAS: f"{layer}.self_attn.q_proj.bias" in names,
    }


def read_eagle(hf_config: HfConfig) -> MtpSpec:
    """Return the spec of a config that `eagle_hf_config` converted. Raises `ConfigError`."""
    _check_layers(hf_config)
    for key in ("add_para_norm", "layernorms"):
        if hf_config.flag(key, False):
            raise hf_config.wrong(key, "false: this variant of EAGLE is not supported")
    hf_config.word("transformer_layer_architecture", _LAYER_CLASSES, _LAYER_CLASSES[0])
    if hf_config.values.get("truncated_vocab_size") not in (None, hf_config.values.get("vocab_size")):
        raise hf_config.wrong("truncated_vocab_size", "equal to vocab_size")
    layer = LayerSpec(
        mixer=attention(hf_config, positions=2048, qkv_bias=hf_config.flag(_QKV_BIAS, False)),
        mlp=gated(hf_config),
        mlp_norms=Norms(before=rms(hf_config)),
    )
    parts = _EAGLE_NAMES[hf_config.word(_LAYER_NAME, tuple(_EAGLE_NAMES), "layers.0")]
    spec = decoder(hf_config, (layer,), None, names=Names(layer=parts.layer))
    return MtpSpec(
        **{field.name: getattr(spec, field.name) for field in fields(spec)},
        parts=(parts,),
        projection_bias=hf_config.flag(_FC_BIAS, False),
        aux_layers=_aux_layers(hf_config),
    )


def eagle3_hf_config(config: Mapping[str, Any], tensors: Collection[str], num_layers: int) -> dict[str, Any]:
    """Return the config of a head of EAGLE-3. tensors: names in its checkpoint. num_layers: of the served model."""
    names = {name.removeprefix("model.") for name in tensors}
    nested = config.get("eagle_config")
    return {
        AUX_LAYERS: list(default_aux_layers(num_layers)),
        **(nested if isinstance(nested, dict) else {}),
        **{key: value for key, value in config.items() if value is not None},
        **(config.get(_LAYER_KEYS) or {}),
        "architectures": [EAGLE_3],
        _OWN_EMBEDDING: "embed_tokens.weight" in names,
        _TOKEN_MAP: "d2t" in names,
        _LAYER_NAME: "layers.0" if any(name.startswith("layers.0.") for name in names) else "midlayer",
    }


def read_eagle3(hf_config: HfConfig) -> EagleSpec:
    """Return the spec of a config that `eagle3_hf_config` converted. Raises `ConfigError`."""
    _check_layers(hf_config)
    for key in ("fc_norm", "norm_output"):
        if hf_config.flag(key, False):
            raise hf_config.wrong(key, "false: this variant of EAGLE-3 is not supported")
    mixer = attention(hf_config, positions=2048, bias_key="attention_bias")
    layer = pre_norm(rms(hf_config), mixer, gated(hf_config, biased=hf_config.flag("mlp_bias", False)))
    names = Names(layer=f"model.{hf_config.word(_LAYER_NAME, ('layers.0', 'midlayer'), 'midlayer')}")
    spec = decoder(hf_config, (layer,), rms(hf_config), names=names)
    vocab_size = hf_config.whole(VOCAB, 1, MAX_VOCAB)
    return EagleSpec(
        **{field.name: getattr(spec, field.name) for field in fields(spec)},
        draft_vocab_size=hf_config.whole("draft_vocab_size", 1, vocab_size, vocab_size),
        target_hidden_size=hf_config.whole(("target_hidden_size", *HIDDEN), 1, MAX_WIDTH),
        aux_layers=_aux_layers(hf_config),
        norm_before_residual=hf_config.flag("norm_before_residual", False),
        norm_before_fc=hf_config.flag("norm_before_fc", False),
        has_embedding=hf_config.flag(_OWN_EMBEDDING, False),
        has_token_map=hf_config.flag(_TOKEN_MAP, False),
    )


def _check_layers(hf_config: HfConfig) -> None:
    if num_layers(hf_config) != 1:
        raise hf_config.wrong("num_hidden_layers", "1: heads with several layers are not supported")


def _aux_layers(hf_config: HfConfig) -> tuple[int, ...]:
    key = ("aux_hidden_state_layer_ids", AUX_LAYERS)
    value = hf_config.values.get(hf_config.spelling(key))
    if (
        not isinstance(value, list)
        or not value
        or any(type(each) is not int or not 0 <= each <= MAX_LAYERS for each in value)
    ):
        raise hf_config.wrong(key, "a list of layer numbers")
    return tuple(sorted(set(value)))


_LAST_LAYER = "served_layers"
_PREFIXES = ("medusa_head.", "medusa_heads.")
"""Optional prefixes of all tensors."""
_FORMAT, _PREFIX, _BIASED = "names", "prefix", "biased"
"""Keys of the converted config: format and prefix of the names, and whether residual layers have biases."""
_HEADS, _DEPTH = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", *LAYERS)


@dataclass(frozen=True, slots=True)
class MedusaNames:
    """Tensor names without ``.weight``."""

    layer: str
    output: str

    def of_layer(self, head: int, layer: int) -> str:
        """Return the name of a residual layer."""
        return self.layer.format(head=head, layer=layer)

    def of_output(self, head: int, num_layers: int) -> str:
        """Return the name of a head's output layer."""
        return self.output.format(head=head, layer=num_layers)


_MEDUSA_NAMES = {
    "authors": MedusaNames("{head}.{layer}.linear", "{head}.{layer}"),
    "vllm": MedusaNames("blocks.{head}.layers.{layer}", "lm_heads.{head}"),
}
"""By format."""


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """The heads of a served model. Implements `quintet.executor.model_config.spec.ModelSpec`."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    """Residual layers of a head."""
    biased: bool
    names: MedusaNames
    prefix: str
    """Optional prefix of the names."""
    aux_layers: tuple[int, ...]
    """The model's last layer, as a number of layers: the hidden states after it are read."""

    kv_needs = ()
    state_needs = ()
    fixed_rope_len = None
    reach = 1 << 24
    has_embedding = True

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that a head can propose."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the served model."""
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """See `ModelSpec`."""
        return self.num_heads * self.hidden_size * (self.num_layers * self.hidden_size + self.vocab_size)

    def has(self, tensor: str) -> bool:
        """Return whether the heads read a tensor."""
        name = tensor.removeprefix(self.prefix).removesuffix(".weight").removesuffix(".bias")
        return any(
            name == self.names.of_output(head, self.num_layers)
            or any(name == self.names.of_layer(head, layer) for layer in range(self.num_layers))
            for head in range(self.num_heads)
        )


def medusa_hf_config(
    config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], num_layers: int
) -> dict[str, Any]:
    """Return the config of heads. tensors: shapes in the checkpoint; empty for dummy weights. num_layers: of the served model."""
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in tensors)), "")
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.items()}
    form = "vllm" if any(name.startswith("blocks.") for name in shapes) else "authors"
    names = _MEDUSA_NAMES[form]
    depth = _num_present(shapes, lambda layer: names.of_layer(0, layer))
    num_heads = _num_present(shapes, lambda head: names.of_output(head, depth))
    output, known = shapes.get(f"{names.of_output(0, depth)}.weight", ()), dict[str, Any]()
    if len(output) == 2:
        known = {VOCAB[0]: output[0], HIDDEN[0]: output[1], _HEADS[0]: num_heads, _DEPTH[0]: depth}
    return {
        **{key: value for key, value in config.items() if value is not None},
        **known,
        "architectures": [MEDUSA],
        _LAST_LAYER: num_layers,
        _FORMAT: form,
        _PREFIX: prefix,
        _BIASED: f"{names.of_layer(0, 0)}.bias" in shapes,
    }


def read_medusa(hf_config: HfConfig) -> MedusaSpec:
    """Return the spec of a config that `medusa_hf_config` converted. Raises `ConfigError`."""
    if hf_config.flag("original_lm_head", False):
        raise hf_config.wrong("original_lm_head", "false: each head needs its own output layer")
    vocab_size = hf_config.whole(VOCAB, 1, MAX_VOCAB)
    if hf_config.values.get("truncated_vocab_size") not in (None, vocab_size):
        raise hf_config.wrong("truncated_vocab_size", "equal to vocab_size")
    return MedusaSpec(
        vocab_size=vocab_size,
        hidden_size=hf_config.whole(HIDDEN, 1, MAX_WIDTH),
        num_heads=hf_config.whole(_HEADS, 1, MAX_DRAFTS),
        num_layers=hf_config.whole(_DEPTH, 0, MAX_LAYERS, 1),
        biased=hf_config.flag(_BIASED, False),
        names=_MEDUSA_NAMES[hf_config.word(_FORMAT, tuple(_MEDUSA_NAMES), "authors")],
        prefix=hf_config.word(_PREFIX, ("", *_PREFIXES), ""),
        aux_layers=(hf_config.whole(_LAST_LAYER, 0, MAX_LAYERS),),
    )


def _num_present(tensors: Collection[str], name_of: Callable[[int], str]) -> int:
    """Return the number of layers or heads, counted from 0, with weights."""
    return sum(1 for _ in takewhile(lambda index: f"{name_of(index)}.weight" in tensors, count()))


DRAFT_HEADS = {
    EAGLE: Family(read_eagle, "EAGLE draft heads", "quintet.executor.models.draft_heads:MtpHead"),
    EAGLE_3: Family(read_eagle3, "EAGLE-3 draft heads", "quintet.executor.models.draft_heads:EagleHead"),
    MEDUSA: Family(read_medusa, "Medusa heads", "quintet.executor.models.draft_heads:MedusaHeads"),
    MTP: Family(read_mtp, "multi-token prediction layers", "quintet.executor.models.draft_heads:MtpHead"),
}
"""By architecture."""

HeadSpec = EagleSpec | MtpSpec | MedusaSpec
