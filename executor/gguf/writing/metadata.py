"""What a GGUF file says of a model, as llama.cpp's converter takes it from the card."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
_SPELLINGS = {"su": "longrope"}


_SPELLED = {
    "num_hidden_layers": ("num_layers", "n_layers", "layers_block_type"),
    "num_key_value_heads": ("multi_query_group_num",),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size",),
    "rms_norm_eps": ("layernorm_epsilon",),
    "rope_theta": ("rotary_emb_base",),
    "max_position_embeddings": ("max_seq_len", "seq_length", "model_max_length"),
    "hidden_size": ("d_model",),
    "num_attention_heads": ("n_heads",),
}
"""How a few cards spell what the others agree on."""


def usual(config: Config) -> Config:
    """Return the card as most would have it."""
    found = {key: either(config, key, *others) for key, others in _SPELLED.items()}
    layers = found["num_hidden_layers"]
    found["num_hidden_layers"] = len(layers) if isinstance(layers, list) else layers
    return config | {key: value for key, value in found.items() if value is not None}


def metadata_of(config: Config, arch: str) -> Config:
    """Return what the file says of the model's shape."""
    hidden = either(config, "hidden_size", "n_embd")
    heads = either(config, "num_attention_heads", "n_head", missing=1)
    rope, theta = rope_of(config), config.get("rope_theta")
    said = {
        "block_count": either(config, "num_hidden_layers", "n_layer"),
        "context_length": either(config, "max_position_embeddings", "n_positions", missing=2048),
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads_of(config),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": either(
            config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"
        ),
        "rope.freq_base": None if arch == "gpt2" else float(rope.get("rope_theta") or theta or 10000.0),
        "rope.dimension_count": None if arch == "gpt2" else _rotated(config),
        "vocab_size": config["vocab_size"],
        **_scaling(rope),
        **_more(config, arch),
    }
    return {key: value for key, value in said.items() if value is not None}


def _more(config: Config, arch: str) -> Config:
    """Return what only some architectures say."""
    experts = either(config, "num_local_experts", "num_experts", missing=0)
    routed = {
        "expert_count": experts,
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    dim = {"attention.key_length": head_dim(config), "attention.value_length": head_dim(config)}
    window = {"attention.sliding_window": config.get("sliding_window") or 0}
    caps = {
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    match arch:
        case "qwen2moe" | "qwen3moe":
            return routed | dim
        case "llama" if experts:
            return routed
        case "qwen3" | "gemma" | "llama":
            return dim
        case "gemma2" | "gemma3":
            return dim | window | caps
        case "cohere2" | "olmo2" | "exaone4":
            slides = {"attention.sliding_window": config.get("sliding_window")}
            return slides | {"logit_scale": config.get("logit_scale")}
        case "command-r":
            return {"logit_scale": config.get("logit_scale")}
        case "gptneox" | "stablelm":
            return {"use_parallel_residual": config["use_parallel_residual"]}
        case "olmo":
            return {"attention.clamp_kqv": config.get("clip_qkv"), "attention.layer_norm_epsilon": 1e-5}
        case "olmoe":
            return {**routed, "expert_feed_forward_length": None}
        case "granite":
            return {
                "attention.scale": config["attention_multiplier"],
                "embedding_scale": config["embedding_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
            }
        case "lfm2":
            kinds = config["layer_types"]
            kv_heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
            wide = {"feed_forward_length": _lfm2_width(config), "shortconv.l_cache": config["conv_L_cache"]}
            wide["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
            return {"attention.head_count_kv": kv_heads, **wide}
        case "mamba" | "mamba2":
            return _of_states(config)
        case "ernie4_5" | "seed_oss" | "glm4":
            return dim
        case "phi3":
            return window | {
                "rope.scaling.original_context_length": config["original_max_position_embeddings"]
            }
    return {}


def _lfm2_width(config: Config) -> int:
    """Return the width of its feed-forwards, of which the card has another that is rounded."""
    if not config.get("block_auto_adjust_ff_dim"):
        return int(config["intermediate_size"])
    step = config["block_multiple_of"]
    wide = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    return int(step * -(-wide // step))


def _of_states(config: Config) -> Config:
    """Return what files of Mamba say."""
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
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config.get("num_heads") or config["time_step_rank"],
        "ssm.group_count": config.get("n_groups"),
    }


def kv_heads_of(config: Config) -> int:
    """Return how many heads of keys there are."""
    heads = int(either(config, "num_attention_heads", "n_head", missing=1))
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return int(either(config, "num_key_value_heads", "num_kv_heads", missing=heads))


def rope_of(config: Config) -> Config:
    """Return what a card says of the rotation, of the layers that see everything."""
    found: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(found.get("full_attention", found))
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return rope | {"rope_type": _SPELLINGS.get(kind, kind)}


def _scaling(rope: Config) -> Config:
    """Return what files say of a rotation that was stretched, where they say it in words."""
    kind = rope["rope_type"]
    if kind not in ("linear", "yarn"):
        return {}
    return {
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
    """Return how many numbers of a head are rotated."""
    rope = config.get("rope_parameters") or {}
    share = either(rope | config, "partial_rotary_factor", "rotary_pct", missing=1.0)
    return int(head_dim(config) * share)


def head_dim(config: Config) -> int:
    """Return the numbers of a head."""
    heads = either(config, "num_attention_heads", "n_head", missing=1)
    return int(config.get("head_dim") or either(config, "hidden_size", "n_embd") // heads)


def either(config: Config, *keys: str, missing: Any = None) -> Any:
    """Return the first of the keys' values that there is."""
    return next((config[key] for key in keys if config.get(key) is not None), missing)
