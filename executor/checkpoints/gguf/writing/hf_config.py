"""Normalisation of keys that configs spell differently."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
_SPELLINGS = {"su": "longrope"}

_SPELLED = {
    "num_hidden_layers": ("num_layers", "n_layers", "n_layer", "layers_block_type"),
    "num_key_value_heads": ("multi_query_group_num", "num_kv_heads"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size", "n_inner"),
    "rms_norm_eps": ("layernorm_epsilon",),
    "rope_theta": ("rotary_emb_base",),
    "max_position_embeddings": ("max_seq_len", "seq_length", "model_max_length", "n_positions"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
}
"""Alternative spellings of common keys, by common key."""


def usual(config: Config) -> Config:
    """Return the config with the common keys."""
    found = {key: either(config, key, *others) for key, others in _SPELLED.items()}
    layers = found["num_hidden_layers"]
    found["num_hidden_layers"] = len(layers) if isinstance(layers, list) else layers
    return config | {key: value for key, value in found.items() if value is not None}


def kv_heads_of(config: Config) -> int:
    """Return the number of KV heads."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return int(either(config, "num_key_value_heads", "num_attention_heads", missing=1))


def head_dim(config: Config) -> int:
    """Return the head dimension."""
    return int(config.get("head_dim") or config["hidden_size"] // config.get("num_attention_heads", 1))


def rope_of(config: Config) -> Config:
    """Return the rotation's settings, of full-attention layers."""
    found: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(found.get("full_attention", found))
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return rope | {"rope_type": _SPELLINGS.get(kind, kind)}


def copied(config: Config, keys: Config) -> Config:
    """Return metadata of the config's values, by the GGUF key of each. Raises KeyError for a missing one."""
    return {theirs: config[ours] for ours, theirs in keys.items()}


def either(config: Config, *keys: str, missing: Any = None) -> Any:
    """Return the first value that is present."""
    return next((config[key] for key in keys if config.get(key) is not None), missing)
