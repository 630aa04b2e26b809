"""Additional metadata of GGUF files of recurrent models: see `metadata`."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.checkpoints.gguf.common_values import DELTA, GRANITE, MAMBA, MAMBA_OF_HYBRID, NEMOTRON_H
from quintet.executor.checkpoints.gguf.writing.attention_metadata import SIGMOID, experts
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, copied, kv_heads_of, rope_of


def _kv_heads(config: Config, attends: list[bool]) -> Config:
    return {"attention.head_count_kv": [kv_heads_of(config) if each else 0 for each in attends]}


def _mamba(config: Config) -> Config:
    """Return Mamba's metadata."""
    inner = config["num_heads"] * config["head_dim"] if "num_heads" in config else config["intermediate_size"]
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": None,
        "rope.freq_base": None,
        "rope.dimension_count": None,
        "context_length": 1 << 20,
        **copied(config, MAMBA),
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config.get("num_heads") or config["time_step_rank"],
        "ssm.group_count": config.get("n_groups"),
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba" or None,
    }


def _mamba2(config: Config) -> Config:
    heads = config["mamba_n_heads"]
    return {
        **copied(config, MAMBA_OF_HYBRID),
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": heads * config["mamba_d_head"],
        "ssm.time_step_rank": heads,
    }


def _granite_hybrid(config: Config) -> Config:
    kinds = config.get("layers_block_type") or config["layer_types"]
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    rotated = config.get("position_embedding_type") == "rope"
    found = experts(config) | copied(config, GRANITE) | _mamba2(config) | _kv_heads(config, attends)
    found |= {"rope.scaling.finetuned": rotated}
    if config.get("num_local_experts"):
        return found | {"feed_forward_length": config["intermediate_size"]}
    width = config["shared_intermediate_size"]
    return found | {"expert_count": None, "expert_used_count": None, "feed_forward_length": width}


def _jamba(config: Config) -> Config:
    count, period, offset = (
        config[k] for k in ("num_hidden_layers", "attn_layer_period", "attn_layer_offset")
    )
    found = experts(config) | _kv_heads(config, [i % period == offset for i in range(count)])
    return found | {
        **copied(config, MAMBA_OF_HYBRID),
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "expert_feed_forward_length": None,
        "rope.dimension_count": None,
        "rope.freq_base": None,
    }


def _nemotron_h(config: Config) -> Config:
    kinds = config["layers_block_type"]
    heads = config["mamba_num_heads"]
    return _kv_heads(config, [kind == "full_attention" for kind in kinds]) | {
        "block_count": len(kinds),
        "feed_forward_length": [config["intermediate_size"] if kind == "mlp" else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        **copied(config, NEMOTRON_H),
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.time_step_rank": heads,
    }


def _delta(config: Config) -> Config:
    heads, rope = config["linear_num_value_heads"], rope_of(config)
    sections = [2, 1, 1, 0] if config["model_type"].startswith("qwen3_5") else None
    return {
        **copied(config, DELTA),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": sections,
    }


def _lfm2(config: Config) -> Config:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    return _kv_heads(config, attends) | {
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
    }


def _lfm2_width(config: Config) -> int:
    """Return the width of the feed-forwards; the config has it before rounding."""
    if not config.get("block_auto_adjust_ff_dim"):
        return int(config["intermediate_size"])
    step = config["block_multiple_of"]
    wide = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    return int(step * -(-wide // step))


def _lfm2_moe(config: Config) -> Config:
    dense = {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": SIGMOID}
    return experts(config) | _lfm2(config) | dense


STATES: dict[str, Callable[[Config], Config]] = {
    "falcon-h1": lambda config: _mamba2(config) | {"ssm.inner_size": config["mamba_d_ssm"]},
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": lambda config: _lfm2(config) | {"feed_forward_length": _lfm2_width(config)},
    "lfm2moe": _lfm2_moe,
    "mamba": _mamba,
    "mamba2": _mamba,
    "nemotron_h": _nemotron_h,
    "qwen35": _delta,
    "qwen35moe": lambda config: experts(config) | _delta(config),
    "qwen3next": lambda config: experts(config) | _delta(config),
}
"""Keyed by architecture."""
