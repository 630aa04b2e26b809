"""What most architectures say in one way in a GGUF file, as values of a card. Imports no torch."""

from __future__ import annotations

from typing import Any

from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata

Values = dict[str, Any]

KEYS = {
    "attention_multiplier": "attention.scale",
    "conv_kernel": "ssm.conv_kernel",
    "embedding_multiplier": "embedding_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "logits_scaling": "logit_scale",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "n_groups": "ssm.group_count",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count",
    "partial_rotary_factor": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "routed_scaling_factor": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "state_size": "ssm.state_size",
    "time_step_rank": "ssm.time_step_rank",
    "topk_group": "expert_group_used_count",
}
"""What files call the values of a card, for error messages: most of them, below the architecture's name."""


def common(said: GgufMetadata) -> Values:
    """Return what most families call the same."""
    hidden, heads = said.whole("embedding_length"), max(said.largest("attention.head_count", 0), 1)
    dim = said.whole("attention.key_length", hidden // heads)
    eps = said.get("attention.layer_norm_epsilon", said.get("attention.layer_norm_rms_epsilon"))
    return {
        "vocab_size": said.rows("token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": said.get("feed_forward_length"),
        "num_hidden_layers": num_layers(said),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": said.get("context_length"),
        "rms_norm_eps": said.get("attention.layer_norm_rms_epsilon", eps),
        "layer_norm_eps": eps,
        "layer_norm_epsilon": eps,
        "norm_epsilon": eps,
        "rope_theta": said.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(said),
        "partial_rotary_factor": _share(said.whole("rope.dimension_count", dim), dim),
        "tie_word_embeddings": "output.weight" not in said.tensors,
        "attention_bias": said.has("attn_q.bias", "attn_qkv.bias"),
        "mlp_bias": said.has("ffn_up.bias"),
    }


def num_layers(said: GgufMetadata) -> int:
    """Return how many layers there are, but for those behind them that predict further tokens."""
    count = said.whole("block_count") - said.whole("nextn_predict_layers", 0)
    if count < 1:
        raise said.wrong("block_count", "more than nextn_predict_layers")
    return count


def _share(count: int, dim: int) -> float:
    """Return the share of a head that is rotated, such that its product with the head's numbers is cut to the count."""
    share = count / max(dim, 1)
    return share if int(dim * share) == count else (count + 0.5) / max(dim, 1)


def _scaling(said: GgufMetadata) -> Values | None:
    kind, factor = said.get("rope.scaling.type"), said.get("rope.scaling.factor")
    original = said.get("rope.scaling.original_context_length")
    if said.has("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": said.factors("rope_factors_short.weight"),
            "long_factor": said.factors("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": said.get("rope.scaling.attn_factor"),
        }
    if said.has("rope_freqs.weight"):
        return {"rope_type": "factors", "factors": said.factors("rope_freqs.weight")}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        stretch = 10.0 * said.real("rope.scaling.yarn_log_multiplier", 0.0)  # of the factor's logarithm
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": said.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": said.get("rope.scaling.yarn_beta_slow"),
            "attention_factor": said.get("rope.scaling.yarn_attn_factor"),
            **({"mscale": stretch, "mscale_all_dim": stretch} if stretch else {}),
        }
    if kind not in (None, "none"):
        raise said.wrong("rope.scaling.type", "none, linear or yarn")
    return None


def layer_kinds(said: GgufMetadata) -> Values:
    """Return which layers slide, of architectures whose families have a period of their own for files that do not say."""
    pattern, key = said.get("attention.sliding_window_pattern"), "sliding_window_pattern"
    if not isinstance(pattern, list):
        return {key: pattern}
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern[: num_layers(said)]]
    return {key: None, "layer_types": kinds}
