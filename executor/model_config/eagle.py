"""EAGLE draft heads: one layer over the hidden states of the served model (Li et al., "EAGLE", 2024, and "EAGLE-3", 2025).

Two formats of the ``config.json`` of EAGLE-3 exist: that of the authors, and that of the library ``speculators``, with the
layer's values in ``transformer_layer_config``. `eagle3_hf_config` converts both into one config.

A head of EAGLE or EAGLE-2 is a decoder layer like one for multi-token prediction, without norms around it. Its
embedding and output layer are the served model's; copies of them in a checkpoint are not read. `eagle_hf_config` converts the
authors' format, and that of vLLM with the layer's values in ``model``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.mtp import MtpNames, MtpSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    HIDDEN,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    VOCAB,
    attention,
    decoder,
    gated,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, Norms

ARCHITECTURE, ARCHITECTURE_3 = "EagleSpeculator", "Eagle3Speculator"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYER_KEYS = "transformer_layer_config"
_OWN_EMBEDDING, _TOKEN_MAP, _LAYER_NAME = "own_embedding", "token_map", "layer_name"
_FC_BIAS, _QKV_BIAS = "fc_bias", "qkv_bias"
"""Keys of the converted config: whether the checkpoint has these tensors, and its name of the layer."""
_NAMES = MtpNames("model.layers.0", None, None, "model.fc", output_norm=None, has_output_norm=False)


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
    nested = config.get("model")
    return {
        **(nested if isinstance(nested, dict) else {}),
        **{key: value for key, value in config.items() if value is not None},
        "architectures": [ARCHITECTURE],
        AUX_LAYERS: [num_layers],
        _FC_BIAS: "fc.bias" in names,
        _QKV_BIAS: "layers.0.self_attn.q_proj.bias" in names,
    }


def read_eagle(hf_config: HfConfig) -> MtpSpec:
    """Return the spec of a config that `eagle_hf_config` converted. Raises `ConfigError`."""
    if _LAYER_KEYS in hf_config.values:
        raise hf_config.wrong(_LAYER_KEYS, "absent: only the format of EAGLE's authors is supported")
    _check_layers(hf_config)
    if hf_config.flag("add_para_norm", False):
        raise hf_config.wrong("add_para_norm", "false: this variant of EAGLE is not supported")
    if hf_config.values.get("truncated_vocab_size") not in (None, hf_config.values.get("vocab_size")):
        raise hf_config.wrong("truncated_vocab_size", "equal to vocab_size")
    layer = LayerSpec(
        mixer=attention(hf_config, positions=2048, qkv_bias=hf_config.flag(_QKV_BIAS, False)),
        mlp=gated(hf_config),
        mlp_norms=Norms(before=rms(hf_config)),
    )
    spec = decoder(hf_config, (layer,), None, names=Names(layer=_NAMES.layer))
    return MtpSpec(
        **{field.name: getattr(spec, field.name) for field in fields(spec)},
        parts=(_NAMES,),
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
        "architectures": [ARCHITECTURE_3],
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
