"""Nemotron models with different kinds of layers: NAS models, and hybrids with Mamba 2. `dense` has Nemotron 3 and 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.families.mamba import MAMBA_NAMES, groups, state_size, taps
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.shape import (
    LAYERS,
    MAX_LAYERS,
    MAX_WIDTH,
    WIDTH,
    Family,
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
_H_NAMES = replace(
    MAMBA_NAMES,
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    ignored=("mtp.*",),
)


def nas(hf_config: HfConfig) -> DecoderSpec:
    """Nemotron-NAS and DeciLM: Llama with attention and feed-forward of each layer reduced or removed by a search.

    Llama-3.1-Nemotron 51B, Llama-3.3-Nemotron-Super 49B, Ultra 253B.
    """
    count, norm = num_layers(hf_config), rms(hf_config)
    blocks = _listed(hf_config, "block_configs", count, dict, {})
    kv_heads = _listed(hf_config, "num_key_value_heads_per_layer", count, int, None)
    layers = []
    for index, (block, shared) in enumerate(zip(blocks, kv_heads, strict=True)):
        inner = HfConfig(block, hf_config.path, f"block_configs[{index}].")
        layers.append(_reduced_layer(hf_config, inner.section("attention"), inner.section("ffn"), shared))
    if not any(layer.mixer for layer in layers):
        raise hf_config.wrong("block_configs", "a list with attention in at least one layer")
    before = Norms(before=norm)
    layers = [replace(each, mixer_norms=before, mlp_norms=before) for each in layers]
    return decoder(hf_config, layers, norm)


def _listed(hf_config: HfConfig, key: str, count: int, kind: type, default: Any) -> list[Any]:
    """Return a config's list with one item per layer."""
    values = hf_config.values.get(key)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) != count or not all(type(each) is kind for each in values):
        raise hf_config.wrong(key, f"a list of {count}, one for each layer")
    return values


def _reduced_layer(hf_config: HfConfig, mixer: HfConfig, mlp: HfConfig, shared: int | None) -> LayerSpec:
    """Return a reduced layer."""
    for part in (mixer, mlp):
        if part.flag("replace_with_linear", False):
            raise part.wrong("replace_with_linear", "false: such layers are not supported")
    heads = num_heads(hf_config)
    kv_heads = num_kv_heads(hf_config) if shared is None else shared
    if mixer.has("n_heads_in_group"):
        kv_heads = heads // mixer.whole("n_heads_in_group", 1, heads)
    if kv_heads < 1 or heads % kv_heads:
        raise hf_config.wrong("num_attention_heads", "a multiple of each layer's key and value heads")
    attention_spec = attention(hf_config, positions=2048, num_kv_heads=kv_heads, bias_key="attention_bias")
    gates = None
    if not mlp.flag("no_op", False):
        wide = mlp if mlp.has("intermediate_size") else hf_config
        width = (
            -(-int(2 * mlp.real("ffn_mult", 1e-3, 1e3) * hidden_size(hf_config) / 3) // _WIDTH_STEP)
            * _WIDTH_STEP
            if mlp.has("ffn_mult")
            else wide.whole(WIDTH, 1, MAX_WIDTH)
        )
        gates = MlpSpec(
            width=width, activation=activation(hf_config, "silu"), biased=hf_config.flag("mlp_bias", False)
        )
    return LayerSpec(mixer=None if mixer.flag("no_op", False) else attention_spec, mlp=gates)


def hybrid(hf_config: HfConfig) -> DecoderSpec:
    """Nemotron-H 8B to 56B, Nemotron Nano 2: a layer is Mamba 2, attention without positions, or squared ReLU."""
    kinds = _kinds(hf_config)
    hf_config = replace(hf_config, values={**hf_config.values, "num_hidden_layers": len(kinds)})
    norm = rms(hf_config, 1e-5, rounds_once=True)
    attention_spec = attention(hf_config, kv_heads=8, head_dim=128, rotated=False, bias_key="attention_bias")
    before = Norms(before=norm)
    wide = plain(hf_config, "relu2", "mlp_hidden_act", biased=hf_config.flag("mlp_bias", False))
    layers = {
        "linear_attention": LayerSpec(mixer=_mamba(hf_config), mixer_norms=before),
        "full_attention": LayerSpec(mixer=attention_spec, mixer_norms=before),
        "mlp": LayerSpec(mlp=wide, mlp_norms=before),
    }
    chosen = [layers[kind] for kind in kinds]
    return decoder(hf_config, chosen, norm, names=_H_NAMES, reach=max_positions(hf_config, 4096))


def _kinds(hf_config: HfConfig) -> list[str]:
    """Return each layer's kind, from a string of letters or a list of words."""
    key = hf_config.spelling(("layer_types", "layers_block_type", "hybrid_override_pattern"))
    listed = hf_config.values.get(key)
    kinds = [_KINDS.get(str(each), str(each)) for each in listed] if isinstance(listed, str | list) else []
    known = not set(kinds) - set(_KINDS.values()) and len(kinds) <= MAX_LAYERS
    if not known or not {"linear_attention", "full_attention"} & set(kinds):
        raise hf_config.wrong(
            key,
            "a letter for each layer: M (Mamba), * (attention), - (feed-forward), with at least one M or *",
        )
    if hf_config.has(LAYERS) and num_layers(hf_config) != len(kinds):
        raise hf_config.wrong(key, f"a list of {num_layers(hf_config)} layers, as num_hidden_layers")
    return kinds


def _mamba(hf_config: HfConfig) -> Mamba2Spec:
    hf_config.word("mamba_hidden_act", ("silu", "swish"), "silu")
    heads, biased = hf_config.whole("mamba_num_heads", 1, MAX_WIDTH, 128), hf_config.flag("use_bias", False)
    return Mamba2Spec(
        num_heads=heads,
        head_dim=hf_config.whole("mamba_head_dim", 1, MAX_WIDTH // heads, 64),
        groups=groups(hf_config, "n_groups", 8, heads),
        state_size=state_size(hf_config, "ssm_state_size", 128),
        taps=taps(hf_config, "conv_kernel"),
        conv_bias=hf_config.flag("use_conv_bias", True),
        projection_bias=biased,
        output_bias=biased,
        norm=rms(hf_config, 1e-5),
        dt_limits=(hf_config.real("time_step_min", 0.0, 1e6, 0.001), float("inf")),
    )


FAMILIES = {
    "DeciLMForCausalLM": Family(nas, "Nemotron-NAS: Super 49B, 51B, Ultra 253B; DeciLM"),
    "NemotronHForCausalLM": Family(hybrid, "Nemotron-H, Nemotron Nano 2"),
}
