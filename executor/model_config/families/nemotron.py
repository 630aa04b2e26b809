"""Nemotron models with different kinds of layers: NAS models, and hybrids with Mamba 2. `dense` has Nemotron 3 and 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.families.mamba import groups, state_size, taps
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    LAYERS,
    MAX_LAYERS,
    MAX_WIDTH,
    WIDTH,
    activation,
    attention,
    decoder,
    hidden_size,
    max_positions,
    num_heads,
    num_kv_heads,
    num_layers,
    plain,
    rms,
)
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, MlpSpec, Norms
from quintet.executor.model_config.state_specs import Mamba2Spec

_WIDTH_STEP = 256
"""Widths computed from a factor are rounded up to a multiple of this."""
_KINDS = {
    "M": "linear_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "attention": "full_attention",
    "-": "mlp",
}
_H_NAMES = Names(
    prefix="backbone.",
    embedding="backbone.embeddings",
    layer="backbone.layers.{layer}",
    final_norm="backbone.norm_f",
    mixer_norm="norm",
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    ignored=("mtp.*",),
)


def nas(card: ModelCard) -> DecoderSpec:
    """Nemotron-NAS and DeciLM: Llama with attention and feed-forward of each layer reduced or removed by a search.

    Llama-3.1-Nemotron 51B, Llama-3.3-Nemotron-Super 49B, Ultra 253B.
    """
    count, norm = num_layers(card), rms(card)
    blocks = _listed(card, "block_configs", count, dict, {})
    kv_heads = _listed(card, "num_key_value_heads_per_layer", count, int, None)
    layers = []
    for index, (block, shared) in enumerate(zip(blocks, kv_heads, strict=True)):
        inner = ModelCard(block, card.path, f"block_configs[{index}].")
        layers.append(_reduced_layer(card, inner.section("attention"), inner.section("ffn"), shared))
    if not any(layer.mixer for layer in layers):
        raise card.wrong("block_configs", "a list with attention in at least one layer")
    layers = [
        LayerSpec(
            mixer=each.mixer, mlp=each.mlp, mixer_norms=Norms(before=norm), mlp_norms=Norms(before=norm)
        )
        for each in layers
    ]
    return decoder(card, layers, norm)


def _listed(card: ModelCard, key: str, count: int, kind: type, default: Any) -> list[Any]:
    """Return a card's list with one item per layer."""
    values = card.values.get(key)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) != count or not all(type(each) is kind for each in values):
        raise card.wrong(key, f"a list of {count}, one for each layer")
    return values


def _reduced_layer(card: ModelCard, mixer: ModelCard, mlp: ModelCard, shared: int | None) -> LayerSpec:
    """Return a reduced layer."""
    for part in (mixer, mlp):
        if part.flag("replace_with_linear", False):
            raise part.wrong("replace_with_linear", "false: such layers are not supported")
    heads = num_heads(card)
    kv_heads = num_kv_heads(card) if shared is None else shared
    if mixer.has("n_heads_in_group"):
        kv_heads = heads // mixer.whole("n_heads_in_group", 1, heads)
    if kv_heads < 1 or heads % kv_heads:
        raise card.wrong("num_attention_heads", "a multiple of each layer's key and value heads")
    biased = card.flag("attention_bias", False)
    attention_spec = attention(
        card, positions=2048, num_kv_heads=kv_heads, qkv_bias=biased, output_bias=biased
    )
    gates = None
    if not mlp.flag("no_op", False):
        wide = mlp if mlp.has("intermediate_size") else card
        width = (
            -(-int(2 * mlp.real("ffn_mult", 1e-3, 1e3) * hidden_size(card) / 3) // _WIDTH_STEP) * _WIDTH_STEP
            if mlp.has("ffn_mult")
            else wide.whole(WIDTH, 1, MAX_WIDTH)
        )
        gates = MlpSpec(width=width, activation=activation(card, "silu"), biased=card.flag("mlp_bias", False))
    return LayerSpec(
        mixer=None if mixer.flag("no_op", False) else attention_spec,
        mlp=gates,
        mixer_norms=Norms(),
        mlp_norms=Norms(),
    )


def hybrid(card: ModelCard) -> DecoderSpec:
    """Nemotron-H 8B to 56B, Nemotron Nano 2: a layer is Mamba 2, attention without positions, or squared ReLU."""
    kinds = _kinds(card)
    card = replace(card, values={**card.values, "num_hidden_layers": len(kinds)})
    norm, biased = rms(card, 1e-5, rounds_once=True), card.flag("attention_bias", False)
    attention_spec = attention(
        card, kv_heads=8, head_dim=128, rotated=False, qkv_bias=biased, output_bias=biased
    )
    before, nothing = Norms(before=norm), Norms()
    wide = plain(card, "relu2", "mlp_hidden_act", biased=card.flag("mlp_bias", False))
    layers = {
        "linear_attention": LayerSpec(mixer=_mamba(card), mlp=None, mixer_norms=before, mlp_norms=nothing),
        "full_attention": LayerSpec(mixer=attention_spec, mlp=None, mixer_norms=before, mlp_norms=nothing),
        "mlp": LayerSpec(mixer=None, mlp=wide, mixer_norms=nothing, mlp_norms=before),
    }
    chosen = [layers[kind] for kind in kinds]
    return decoder(card, chosen, norm, names=_H_NAMES, reach=max_positions(card, 4096))


def _kinds(card: ModelCard) -> list[str]:
    """Return each layer's kind, from a string of letters or a list of words."""
    key = card.spelling(("layer_types", "layers_block_type", "hybrid_override_pattern"))
    listed = card.values.get(key)
    kinds = [_KINDS.get(str(each), str(each)) for each in listed] if isinstance(listed, str | list) else []
    known = not set(kinds) - set(_KINDS.values()) and len(kinds) <= MAX_LAYERS
    if not known or not {"linear_attention", "full_attention"} & set(kinds):
        raise card.wrong(
            key,
            "a letter for each layer: M (Mamba), * (attention), - (feed-forward), with at least one M or *",
        )
    if card.has(LAYERS) and num_layers(card) != len(kinds):
        raise card.wrong(key, f"a list of {num_layers(card)} layers, as num_hidden_layers")
    return kinds


def _mamba(card: ModelCard) -> Mamba2Spec:
    card.word("mamba_hidden_act", ("silu", "swish"), "silu")
    heads, biased = card.whole("mamba_num_heads", 1, MAX_WIDTH, 128), card.flag("use_bias", False)
    return Mamba2Spec(
        num_heads=heads,
        head_dim=card.whole("mamba_head_dim", 1, MAX_WIDTH // heads, 64),
        groups=groups(card, "n_groups", 8, heads),
        state_size=state_size(card, "ssm_state_size", 128),
        taps=taps(card, "conv_kernel"),
        conv_bias=card.flag("use_conv_bias", True),
        projection_bias=biased,
        output_bias=biased,
        norm=rms(card, 1e-5),
        dt_limits=(card.real("time_step_min", 0.0, 1e6, 0.001), float("inf")),
    )


FAMILIES = {
    "DeciLMForCausalLM": Family(nas, "Nemotron-NAS: Super 49B, 51B, Ultra 253B; DeciLM"),
    "NemotronHForCausalLM": Family(hybrid, "Nemotron-H, Nemotron Nano 2"),
}
