"""Additional metadata of GGUF files of dense models: see `metadata`."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.checkpoints.gguf.common_values import GRANITE
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, copied, either, head_dim, rope_of


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


DENSE: dict[str, Callable[[Config], Config]] = {
    "chatglm": lambda config: {"rope.dimension_count": head_dim(config) // 2},
    "cohere2": _slides,
    "command-r": lambda config: {"logit_scale": config.get("logit_scale")},
    "deci": _deci,
    "ernie4_5": dimensions,
    "exaone4": _slides,
    "gemma": dimensions,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "glm4": dimensions,
    "gptneox": _parallel,
    "granite": lambda config: copied(config, GRANITE),
    "hunyuan-dense": hunyuan,
    "minicpm": _minicpm,
    "mistral3": _ministral3,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _slides,
    "phi3": _phi3,
    "qwen": lambda config: {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"]},
    "qwen3": dimensions,
    "seed_oss": dimensions,
    "stablelm": _parallel,
}
"""Keyed by architecture."""
