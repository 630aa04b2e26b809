"""Architecture-specific config values of MoE models and of latent attention. Imports no torch."""

from __future__ import annotations

from quintet.executor.checkpoints.gguf.common_values import GRANITE, Values, common
from quintet.executor.checkpoints.gguf.dense_values import slides
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata

_SIGMOID = 2
"""``expert_gating_func`` of sigmoid scores."""


def experts(metadata: GgufMetadata, renormalise: bool = False) -> Values:
    """Return the common MoE values. renormalise: llama.cpp's default of ``expert_weights_norm`` for the architecture."""
    return {
        "num_experts": metadata.get("expert_count"),
        "num_experts_per_tok": metadata.get("expert_used_count"),
        "moe_intermediate_size": metadata.once("expert_feed_forward_length"),
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length"),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
        "norm_topk_prob": metadata.get("expert_weights_norm", renormalise),
        "routed_scaling_factor": metadata.get("expert_weights_scale") or 1.0,
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
    }


def deepseek2_name(metadata: GgufMetadata) -> str:
    """Return the architecture name. DeepSeek V2, V3 and successors share it, and Youtu-LLM, which has no experts."""
    if not metadata.get("expert_count"):
        return "YoutuForCausalLM"
    corrected = metadata.has("exp_probs_b.bias")
    kind = metadata.get("expert_gating_func") or (_SIGMOID if corrected else 0)
    return "DeepseekV3ForCausalLM" if kind == _SIGMOID else "DeepseekV2ForCausalLM"


def deepseek2(metadata: GgufMetadata) -> Values:
    """Return the values of DeepSeek V2 and V3. With ``_mla`` keys, the plain keys describe latents."""
    groups = metadata.get("expert_group_count", 1)
    return {
        **experts(metadata),
        **_latent(metadata, "_mla" if metadata.get("attention.key_length_mla") else ""),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


def minicpm3(metadata: GgufMetadata) -> Values:
    """Return the values of MiniCPM 3; files lack its factors."""
    head = metadata.whole("embedding_length") // max(metadata.whole("attention.head_count"), 1)
    return {
        **_latent(metadata, ""),
        "v_head_dim": head,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _latent(metadata: GgufMetadata, ending: str) -> Values:
    rotated = metadata.whole("rope.dimension_count")
    q_rank = metadata.get("attention.q_lora_rank") if metadata.has("attn_q_a.weight") else None
    return {
        "kv_lora_rank": metadata.get("attention.kv_lora_rank"),
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.whole(f"attention.key_length{ending}") - rotated,
        "v_head_dim": metadata.get(f"attention.value_length{ending}"),
        "head_dim": None,
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
        "attention_bias": False,
    }


def ernie(metadata: GgufMetadata) -> Values:
    """Return the values of ERNIE 4.5 with experts."""
    return {
        **experts(metadata),
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
    }


def hunyuan(metadata: GgufMetadata) -> Values:
    """Return the values of Hunyuan-A13B; its shared expert may be as wide as several experts."""
    width = max(metadata.once("expert_feed_forward_length") or 1, 1)
    shared = metadata.whole("expert_shared_feed_forward_length", width)
    return {**experts(metadata), "num_shared_expert": shared // width, "use_qk_norm": True}


def bailing(metadata: GgufMetadata) -> Values:
    """Return the values of Ling 1 and 2."""
    biased = metadata.has("attn_qkv.bias", "attn_q.bias")
    return {**experts(metadata), "use_qkv_bias": biased, "use_bias": metadata.has("attn_output.bias")}


def minimax(metadata: GgufMetadata) -> Values:
    """Return the values of MiniMax M2; its config has the rotated dimension instead of a fraction."""
    return {
        **experts(metadata),
        "intermediate_size": metadata.once("expert_feed_forward_length"),
        "rotary_dim": metadata.get("rope.dimension_count"),
        "partial_rotary_factor": None,
    }


def granite_moe(metadata: GgufMetadata) -> Values:
    """Return the values of Granite 3 with experts."""
    shared = metadata.get("expert_shared_feed_forward_length", 0)
    return {**metadata.copied(GRANITE), **experts(metadata), "shared_intermediate_size": shared}


def phi_moe(metadata: GgufMetadata) -> Values:
    """Return the values of Phi 3.5 with experts."""
    biased, window = "output.bias" in metadata.tensors, metadata.get("attention.sliding_window")
    return {**experts(metadata), "lm_head_bias": biased, "sliding_window": window}


def gpt_oss(metadata: GgufMetadata) -> Values:
    """Return the values of gpt-oss; its YaRN boundaries are not rounded."""
    scaling = common(metadata)["rope_scaling"]
    return {
        **experts(metadata),
        **slides(metadata),
        "intermediate_size": metadata.once("expert_feed_forward_length"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def llama4(metadata: GgufMetadata) -> Values:
    """Return the values of Llama 4, Scout and Maverick. The number of experts determines QK norms."""
    return {
        **experts(metadata),
        "intermediate_size": metadata.once("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.get("feed_forward_length"),
        "interleave_moe_layer_step": metadata.get("interleave_moe_layer_step"),
        "use_qk_norm": metadata.get("expert_count") != 128,
    }
