"""What a GGUF file says of models of experts, of latents and of states, and of a few others: see `metadata`."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.gguf.writing.metadata import Config, either, head_dim, kv_heads_of, rope_of

_SIGMOID = 2


def more_of(config: Config, arch: str) -> Config:
    """Return what files of this architecture say besides, or instead of, the common values."""
    scale = rope_of(config).get("mscale_all_dim")
    said = _longrope(config) | ({"rope.scaling.yarn_log_multiplier": 0.1 * scale} if scale else {})
    if arch in _ROUTED:
        said |= _experts(config)
    if config.get("head_dim") and arch not in ("deepseek2", "minicpm3"):
        said |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    more = MORE.get(arch)
    return said | (more(config) if more else {})


_ROUTED = frozenset(
    (
        *(
            "bailingmoe",
            "bailingmoe2",
            "deepseek",
            "deepseek2",
            "dots1",
            "ernie4_5-moe",
            "exaone-moe",
            "glm4moe",
        ),
        *(
            "gpt-oss",
            "granitehybrid",
            "granitemoe",
            "hunyuan-moe",
            "jamba",
            "lfm2moe",
            "llama4",
            "minimax-m2",
        ),
        *("phimoe", "qwen35moe", "qwen3next"),
    )
)


def _experts(config: Config) -> Config:
    kinds = config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace") if kinds is None else kinds.index("sparse")
    said = {
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
    return {key: value[0] if isinstance(value, list) else value for key, value in said.items()}


def _longrope(config: Config) -> Config:
    rope = rope_of(config)
    if rope["rope_type"] != "longrope":
        return {}
    longest = config.get("max_position_embeddings")
    original = either(rope | config, "original_max_position_embeddings", missing=longest)
    return {"rope.scaling.original_context_length": original}


def _latent(config: Config) -> Config:
    plain, rotated = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["qk_rope_head_dim"]
    said = {
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": rotated,
    }
    if config["model_type"] == "minicpm3":
        return said | {"attention.key_length": plain, "attention.value_length": config["v_head_dim"]}
    return said | {
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + rotated,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": plain,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _deepseek2(config: Config) -> Config:
    said = _latent(config)
    if "n_routed_experts" not in config:
        dense = config["num_hidden_layers"]
        width = config["intermediate_size"]
        none = {"expert_count": None, "expert_used_count": None, "expert_shared_count": 0}
        return said | none | {"leading_dense_block_count": dense, "expert_feed_forward_length": width}
    sigmoid = config["model_type"] != "deepseek_v2"
    groups = {}
    if config.get("topk_method") == "greedy":
        groups = {"expert_group_count": 1, "expert_group_used_count": 1}
    return said | groups | {"expert_gating_func": _SIGMOID if sigmoid else 1}


def _sigmoid(config: Config) -> Config:
    return {"expert_gating_func": _SIGMOID}


def _windows(config: Config) -> Config:
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": kinds}


def _granite(config: Config) -> Config:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
        "feed_forward_length": config["intermediate_size"],
    }


def _kv_heads(config: Config, attends: list[bool]) -> Config:
    return {"attention.head_count_kv": [kv_heads_of(config) if each else 0 for each in attends]}


def _mamba2(config: Config) -> Config:
    heads = config["mamba_n_heads"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": heads * config["mamba_d_head"],
        "ssm.time_step_rank": heads,
    }


def _granite_hybrid(config: Config) -> Config:
    kinds = config.get("layers_block_type") or config["layer_types"]
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    rotated = config.get("position_embedding_type") == "rope"
    plain = {} if config.get("num_local_experts") else {"expert_count": None, "expert_used_count": None}
    width = (
        config["intermediate_size"] if config.get("num_local_experts") else config["shared_intermediate_size"]
    )
    said = _granite(config) | _mamba2(config) | _kv_heads(config, attends) | plain
    return said | {"rope.scaling.finetuned": rotated, "feed_forward_length": width}


def _falcon_h1(config: Config) -> Config:
    return _mamba2(config) | {"ssm.inner_size": config["mamba_d_ssm"]}


def _jamba(config: Config) -> Config:
    count, period, offset = (
        config[k] for k in ("num_hidden_layers", "attn_layer_period", "attn_layer_offset")
    )
    hidden = config["hidden_size"]
    return _kv_heads(config, [i % period == offset for i in range(count)]) | {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * hidden,
        "ssm.state_size": config["mamba_d_state"],
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
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.time_step_rank": heads,
    }


def _delta(config: Config) -> Config:
    heads = config["linear_num_value_heads"]
    rope = rope_of(config)
    sections = [2, 1, 1, 0] if config["model_type"].startswith("qwen3_5") else None
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": sections,
    }


def _llama4(config: Config) -> Config:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _lfm2_moe(config: Config) -> Config:
    kinds = [kind == "full_attention" for kind in config["layer_types"]]
    return _kv_heads(config, kinds) | {
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": _SIGMOID,
    }


def _hunyuan(config: Config) -> Config:
    rope = rope_of(config)
    theta, dim = rope["rope_theta"], head_dim(config)
    if rope.get("alpha"):
        theta *= rope["alpha"] ** (dim / (dim - 2))
    return {"rope.freq_base": float(theta)}


def _hunyuan_moe(config: Config) -> Config:
    return _hunyuan(config) | {"expert_shared_feed_forward_length": config["intermediate_size"]}


def _ernie(config: Config) -> Config:
    shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    return {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_feed_forward_length": shared,
        "expert_weights_norm": None,
    }


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
    shared = [
        0 if block["attention"].get("no_op") else heads // block["attention"]["n_heads_in_group"]
        for block in blocks
    ]
    widths = [0 if block["ffn"].get("no_op") else _deci_width(config, block["ffn"]) for block in blocks]
    return {
        "attention.head_count": [heads if each else 0 for each in shared],
        "attention.head_count_kv": shared,
        "feed_forward_length": widths,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
    }


def _deci_width(config: Config, block: Config) -> int:
    return -(-int(2 * block["ffn_mult"] * config["hidden_size"] / 3) // 256) * 256


def _ministral3(config: Config) -> Config:
    return {"attention.temperature_scale": rope_of(config).get("llama_4_scaling_beta")}


MORE: dict[str, Callable[[Config], Config]] = {
    "bailingmoe2": lambda config: (
        _sigmoid(config)
        | {
            "expert_shared_feed_forward_length": config["moe_intermediate_size"]
            * config["num_shared_experts"]
        }
    ),
    "chatglm": lambda config: {"rope.dimension_count": head_dim(config) // 2},
    "deci": _deci,
    "deepseek2": _deepseek2,
    "dots1": _sigmoid,
    "ernie4_5-moe": _ernie,
    "exaone-moe": lambda config: _sigmoid(config) | _windows(config),
    "falcon-h1": _falcon_h1,
    "glm4moe": _sigmoid,
    "gpt-oss": _windows,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "jamba": _jamba,
    "lfm2moe": _lfm2_moe,
    "llama4": _llama4,
    "mamba": lambda config: {"ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba" or None},
    "minicpm": _minicpm,
    "minicpm3": _latent,
    "minimax-m2": lambda config: _sigmoid(config) | {"rope.dimension_count": config["rotary_dim"]},
    "mistral3": _ministral3,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "qwen": lambda config: {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"]},
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3next": _delta,
}
