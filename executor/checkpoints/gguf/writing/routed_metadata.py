"""Additional metadata of GGUF files of MoE and latent-attention models: see `metadata`."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.checkpoints.gguf.common_values import GRANITE
from quintet.executor.checkpoints.gguf.writing.dense_metadata import dimensions, hunyuan, windows
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, copied, either

SIGMOID = 2
"""``expert_gating_func`` of sigmoid scores."""
LATENT = frozenset(("deepseek2", "minicpm3"))


def experts(config: Config) -> Config:
    """Return number, width and routing of experts."""
    kinds = config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace") if kinds is None else kinds.index("sparse")
    found = {
        "expert_count": either(
            config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
        ),
        "expert_used_count": either(config, "num_experts_per_tok", "moe_k", "moe_topk"),
        "expert_feed_forward_length": either(config, "moe_intermediate_size", "intermediate_size"),
        "expert_shared_count": either(
            config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
        ),
        "expert_shared_feed_forward_length": either(
            config, "shared_expert_intermediate_size", "shared_intermediate_size"
        ),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "leading_dense_block_count": dense,
    }
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _few(config: Config) -> Config:
    """Return the metadata of the first MoE architectures."""
    return {
        "expert_count": _count(config),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _count(config: Config) -> int:
    return int(either(config, "num_local_experts", "num_experts", missing=0))


def _by_sigmoid(config: Config) -> Config:
    return experts(config) | {"expert_gating_func": SIGMOID}


def _bailing2(config: Config) -> Config:
    shared = config["moe_intermediate_size"] * config["num_shared_experts"]
    return _by_sigmoid(config) | {"expert_shared_feed_forward_length": shared}


def _latent(config: Config) -> Config:
    plain, rotated = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["qk_rope_head_dim"]
    found = {
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": rotated,
    }
    if config["model_type"] == "minicpm3":
        return found | {"attention.key_length": plain, "attention.value_length": config["v_head_dim"]}
    return found | {
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + rotated,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": plain,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _deepseek2(config: Config) -> Config:
    found = experts(config) | _latent(config)
    if "n_routed_experts" not in config:
        dense = config["num_hidden_layers"]
        width = config["intermediate_size"]
        none = {"expert_count": None, "expert_used_count": None, "expert_shared_count": 0}
        return found | none | {"leading_dense_block_count": dense, "expert_feed_forward_length": width}
    sigmoid = config["model_type"] != "deepseek_v2"
    groups = {}
    if config.get("topk_method") == "greedy":
        groups = {"expert_group_count": 1, "expert_group_used_count": 1}
    return found | groups | {"expert_gating_func": SIGMOID if sigmoid else 1}


def _ernie(config: Config) -> Config:
    shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    return experts(config) | {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_feed_forward_length": shared,
        "expert_weights_norm": None,
    }


def _granite(config: Config) -> Config:
    return experts(config) | copied(config, GRANITE) | {"feed_forward_length": config["intermediate_size"]}


def _hunyuan(config: Config) -> Config:
    shared = {"expert_shared_feed_forward_length": config["intermediate_size"]}
    return experts(config) | hunyuan(config) | shared


def _llama4(config: Config) -> Config:
    return experts(config) | {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


ROUTED: dict[str, Callable[[Config], Config]] = {
    "bailingmoe": experts,
    "bailingmoe2": _bailing2,
    "deepseek": experts,
    "deepseek2": _deepseek2,
    "dots1": _by_sigmoid,
    "ernie4_5-moe": _ernie,
    "exaone-moe": lambda config: _by_sigmoid(config) | windows(config),
    "glm4moe": _by_sigmoid,
    "gpt-oss": lambda config: experts(config) | windows(config),
    "granitemoe": _granite,
    "hunyuan-moe": _hunyuan,
    "llama": lambda config: _few(config) if _count(config) else dimensions(config),
    "llama4": _llama4,
    "minicpm3": _latent,
    "minimax-m2": lambda config: _by_sigmoid(config) | {"rope.dimension_count": config["rotary_dim"]},
    "olmoe": lambda config: _few(config) | {"expert_feed_forward_length": None},
    "phimoe": experts,
    "qwen2moe": lambda config: _few(config) | dimensions(config),
    "qwen3moe": lambda config: _few(config) | dimensions(config),
}
"""Keyed by architecture."""
