"""Additional metadata of GGUF files of attention models, dense and routed: see `metadata`."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.checkpoints.gguf.common_values import GRANITE
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, copied, either, head_dim, rope_of

SIGMOID = 2
"""``expert_gating_func`` of sigmoid scores."""
LATENT = frozenset(("deepseek2", "minicpm3"))


def dimensions(config: Config) -> Config:
    """Return the head dimensions."""
    return {"attention.key_length": head_dim(config), "attention.value_length": head_dim(config)}


def windows(config: Config) -> Config:
    """Return the sliding window and the sliding layers."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": kinds}


def _window(config: Config) -> Config:
    return {"attention.sliding_window": config.get("sliding_window") or 0}


def _gemma(config: Config) -> Config:
    caps = {
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    return dimensions(config) | _window(config) | caps


def _slides(config: Config) -> Config:
    return {
        "attention.sliding_window": config.get("sliding_window"),
        "logit_scale": config.get("logit_scale"),
    }


def _parallel(config: Config) -> Config:
    return {"use_parallel_residual": config["use_parallel_residual"]}


def _olmo(config: Config) -> Config:
    return {"attention.clamp_kqv": config.get("clip_qkv"), "attention.layer_norm_epsilon": 1e-5}


def _phi3(config: Config) -> Config:
    longest = config.get("max_position_embeddings")
    original = either(config, "original_max_position_embeddings", missing=longest)
    return _window(config) | {"rope.scaling.original_context_length": original}


def hunyuan(config: Config) -> Config:
    """Return the scaled rotation base."""
    rope = rope_of(config)
    theta, dim = rope["rope_theta"], head_dim(config)
    if rope.get("alpha"):
        theta *= rope["alpha"] ** (dim / (dim - 2))
    return {"rope.freq_base": float(theta)}


def _minicpm(config: Config) -> Config:
    return {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def _mpt(config: Config) -> Config:
    alibi = config["attn_config"]
    return {
        "feed_forward_length": config["expansion_ratio"] * config["d_model"],
        "attention.max_alibi_bias": float(alibi["alibi_bias_max"]),
        "attention.clamp_kqv": alibi["clip_qkv"],
    }


def _deci(config: Config) -> Config:
    heads = config["num_attention_heads"]
    blocks = config["block_configs"]
    attentions = [block["attention"] for block in blocks]
    shared = [0 if each.get("no_op") else heads // each["n_heads_in_group"] for each in attentions]
    widths = [0 if block["ffn"].get("no_op") else _deci_width(config, block["ffn"]) for block in blocks]
    return {
        "attention.head_count": [heads if each else 0 for each in shared],
        "attention.head_count_kv": shared,
        "feed_forward_length": widths,
        **dimensions(config),
    }


def _deci_width(config: Config, block: Config) -> int:
    return -(-int(2 * block["ffn_mult"] * config["hidden_size"] / 3) // 256) * 256


def _ministral3(config: Config) -> Config:
    return {"attention.temperature_scale": rope_of(config).get("llama_4_scaling_beta")}


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


ATTENTION: dict[str, Callable[[Config], Config]] = {
    "bailingmoe": experts,
    "bailingmoe2": _bailing2,
    "chatglm": lambda config: {"rope.dimension_count": head_dim(config) // 2},
    "cohere2": _slides,
    "command-r": lambda config: {"logit_scale": config.get("logit_scale")},
    "deci": _deci,
    "deepseek": experts,
    "deepseek2": _deepseek2,
    "dots1": _by_sigmoid,
    "ernie4_5": dimensions,
    "ernie4_5-moe": _ernie,
    "exaone-moe": lambda config: _by_sigmoid(config) | windows(config),
    "exaone4": _slides,
    "gemma": dimensions,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "glm4": dimensions,
    "glm4moe": _by_sigmoid,
    "gpt-oss": lambda config: experts(config) | windows(config),
    "gptneox": _parallel,
    "granite": lambda config: copied(config, GRANITE),
    "granitemoe": _granite,
    "hunyuan-dense": hunyuan,
    "hunyuan-moe": _hunyuan,
    "llama": lambda config: _few(config) if _count(config) else dimensions(config),
    "llama4": _llama4,
    "minicpm": _minicpm,
    "minicpm3": _latent,
    "minimax-m2": lambda config: _by_sigmoid(config) | {"rope.dimension_count": config["rotary_dim"]},
    "mistral3": _ministral3,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _slides,
    "olmoe": lambda config: _few(config) | {"expert_feed_forward_length": None},
    "phi3": _phi3,
    "phimoe": experts,
    "qwen": lambda config: {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"]},
    "qwen2moe": lambda config: _few(config) | dimensions(config),
    "qwen3": dimensions,
    "qwen3moe": lambda config: _few(config) | dimensions(config),
    "seed_oss": dimensions,
    "stablelm": _parallel,
}
"""Keyed by architecture."""
