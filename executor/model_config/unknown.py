"""Models without a registry entry: provided by another package, or run in transformers.

Reads the usual keys of a config; the executor compares them with the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.model_config.shape import (
    HIDDEN,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    head_width,
    max_positions,
    num_heads,
    num_kv_heads,
    num_layers,
)
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.model_config.state_specs import StateNeed
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UnknownSpec:
    """Implements `quintet.executor.model_config.spec.ModelSpec`."""

    vocab_size: int
    kv_needs: tuple[KvNeed | None, ...]
    reach: int
    fixed_rope_len: int | None
    num_parameters: int | None = None
    state_needs: tuple[StateNeed | None, ...] = ()


def unknown(hf_config: HfConfig) -> UnknownSpec:
    """Read the values needed for serving. An unsupported rotation type does not extend the context.

    Of a multimodal config, read the section for text.
    """
    text = hf_config.section("text_config")
    if text.values and not hf_config.has(HIDDEN):
        hf_config = text
    needs = _kv_needs(hf_config)
    reach, fixed_rope_len = max_positions(hf_config), None
    try:
        rope = rope_spec(hf_config, needs[0].key_dim, reach)
        reach, fixed_rope_len = rope.reach, rope.fixed_len
    except ConfigError:
        pass
    return UnknownSpec(
        vocab_size=hf_config.whole("vocab_size", 1, MAX_VOCAB),
        kv_needs=needs,
        reach=reach,
        fixed_rope_len=fixed_rope_len,
    )


def _kv_needs(hf_config: HfConfig) -> tuple[KvNeed, ...]:
    """Return every layer's keys and values: uncompressed heads, even for latent attention."""
    if hf_config.has("qk_rope_head_dim") and hf_config.has("v_head_dim"):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        key_dim = sum(hf_config.whole(part, 0, MAX_HEAD_DIM) for part in parts)
        value_dim = hf_config.whole("v_head_dim", 1, MAX_HEAD_DIM)
        return (KvNeed(num_heads(hf_config), key_dim, value_dim),) * num_layers(hf_config)
    configs = [_hf_config_of_layer(hf_config, index) for index in range(num_layers(hf_config))]
    return tuple(KvNeed(num_kv_heads(each), head_width(each), head_width(each)) for each in configs)


def _hf_config_of_layer(hf_config: HfConfig, index: int) -> HfConfig:
    """Return the config for one layer, with overrides from ``per_layer_config`` by layer number."""
    own = hf_config.section("per_layer_config").section(str(index))
    return replace(hf_config, values={**hf_config.values, **own.values}) if own.values else hf_config
