"""Config values with the same GGUF keys in most architectures. Imports no torch."""

from __future__ import annotations

from typing import Any

from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata

Values = dict[str, Any]

GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
MAMBA = {"conv_kernel": "ssm.conv_kernel", "state_size": "ssm.state_size"}
MAMBA_OF_HYBRID = {"mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size"}
"""Of models with attention, except Nemotron-H."""
NEMOTRON_H = {
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
}
DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
}

KEYS = {
    **GRANITE,
    **MAMBA,
    **MAMBA_OF_HYBRID,
    **NEMOTRON_H,
    **DELTA,
    "first_k_dense_replace": "leading_dense_block_count",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "linear_num_value_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "num_local_experts": "expert_count",
    "partial_rotary_factor": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "routed_scaling_factor": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "time_step_rank": "ssm.time_step_rank",
    "topk_group": "expert_group_used_count",
}
"""GGUF keys of config values, below the architecture's name; for error messages. Readers and the writer copy the values
of the tables above."""


def common(metadata: GgufMetadata) -> Values:
    """Return the config values that most families share."""
    hidden, heads = metadata.whole("embedding_length"), max(metadata.largest("attention.head_count", 0), 1)
    dim = metadata.whole("attention.key_length", hidden // heads)
    eps = metadata.get("attention.layer_norm_epsilon", metadata.get("attention.layer_norm_rms_epsilon"))
    return {
        "vocab_size": metadata.rows("token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_hidden_layers": num_layers(metadata),
        "num_nextn_predict_layers": metadata.get("nextn_predict_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": metadata.get("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", eps),
        "layer_norm_eps": eps,
        "layer_norm_epsilon": eps,
        "norm_epsilon": eps,
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(metadata),
        "partial_rotary_factor": _share(metadata.whole("rope.dimension_count", dim), dim),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "attention_bias": metadata.has("attn_q.bias", "attn_qkv.bias"),
        "mlp_bias": metadata.has("ffn_up.bias"),
    }


def num_layers(metadata: GgufMetadata) -> int:
    """Return the number of layers, without the next-token-prediction layers at the end."""
    count = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if count < 1:
        raise metadata.wrong("block_count", "more than nextn_predict_layers")
    return count


def is_in_later_layer(name: str, num_layers: int) -> bool:
    """Return True for a tensor of a layer after these, which are for next-token prediction."""
    layer = name.removeprefix("blk.").partition(".")[0] if name.startswith("blk.") else ""
    return layer.isdecimal() and int(layer) >= num_layers


def _share(count: int, dim: int) -> float:
    """Return the rotated fraction of a head; its product with the head dimension truncates to ``count``."""
    share = count / max(dim, 1)
    return share if int(dim * share) == count else (count + 0.5) / max(dim, 1)


def _scaling(metadata: GgufMetadata) -> Values | None:
    kind = metadata.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))  # the key of 2023
    original = metadata.get("rope.scaling.original_context_length")
    if metadata.has("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": metadata.factors("rope_factors_short.weight"),
            "long_factor": metadata.factors("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": metadata.get("rope.scaling.attn_factor"),
        }
    if metadata.has("rope_freqs.weight"):
        return {"rope_type": "factors", "factors": metadata.factors("rope_freqs.weight")}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor else None
    if kind == "yarn":
        stretch = 10.0 * metadata.real("rope.scaling.yarn_log_multiplier", 0.0)  # per logarithm of the factor
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
            "attention_factor": metadata.get("rope.scaling.yarn_attn_factor"),
            **({"mscale": stretch, "mscale_all_dim": stretch} if stretch else {}),
        }
    if kind != "none":
        raise metadata.wrong("rope.scaling.type", "none, linear or yarn")
    return None


def layer_kinds(metadata: GgufMetadata) -> Values:
    """Return the sliding layers, for architectures with a default period in their family."""
    pattern, key = metadata.get("attention.sliding_window_pattern"), "sliding_window_pattern"
    if not isinstance(pattern, list):
        return {key: pattern}
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern[: num_layers(metadata)]]
    return {key: None, "layer_types": kinds}
