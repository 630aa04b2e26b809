"""Metadata of a GGUF file from a config, like llama.cpp's converter: common keys and RoPE.

`attention_metadata` and `state_metadata` (recurrent models) add keys; none removes one.
"""

from __future__ import annotations

from typing import Any

from quintet.executor.checkpoints.gguf.writing.attention_metadata import ATTENTION, LATENT, dimensions
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, either, head_dim, kv_heads_of, rope_of
from quintet.executor.checkpoints.gguf.writing.state_metadata import STATES
from quintet.executor.model_config.mtp import NUM_LAYERS


def metadata_of(config: Config, arch: str) -> Config:
    """Return the metadata of the model's shape."""
    hidden = config["hidden_size"]
    rope, theta = rope_of(config), config.get("rope_theta")
    found = {
        "block_count": config["num_hidden_layers"] + config.get(NUM_LAYERS, 0),
        "nextn_predict_layers": config.get(NUM_LAYERS) or None,
        "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size") or 4 * hidden,
        "attention.head_count": config.get("num_attention_heads", 1),
        "attention.head_count_kv": kv_heads_of(config),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": either(
            config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"
        ),
        "rope.freq_base": None if arch == "gpt2" else float(rope.get("rope_theta") or theta or 10000.0),
        "rope.dimension_count": None if arch == "gpt2" else _rotated(config),
        "vocab_size": config["vocab_size"],
        **_scaling(config, rope),
    }
    if config.get("head_dim") and arch not in LATENT:
        found |= dimensions(config)
    for table in (ATTENTION, STATES):
        if arch in table:
            found |= table[arch](config)
    return {key: value for key, value in found.items() if value is not None}


def _scaling(config: Config, rope: Config) -> Config:
    """Return the RoPE scaling keys."""
    kind, scale = rope["rope_type"], rope.get("mscale_all_dim")
    found: Config = {"rope.scaling.yarn_log_multiplier": 0.1 * scale} if scale else {}
    if kind == "longrope":
        longest = config.get("max_position_embeddings")
        original = either(rope | config, "original_max_position_embeddings", missing=longest)
        return found | {"rope.scaling.original_context_length": original}
    if kind not in ("linear", "yarn"):
        return found
    return found | {
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": _real(rope.get("beta_fast")),
        "rope.scaling.yarn_beta_slow": _real(rope.get("beta_slow")),
        "rope.scaling.yarn_attn_factor": _real(rope.get("attention_factor")),
    }


def _real(value: Any) -> float | None:
    return None if value is None else float(value)


def _rotated(config: Config) -> int:
    """Return the rotated values of a head."""
    rope = config.get("rope_parameters") or {}
    share = either(rope | config, "partial_rotary_factor", "rotary_pct", missing=1.0)
    return int(head_dim(config) * share)
