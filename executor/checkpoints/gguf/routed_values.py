"""What models of experts, and those that attend over latents, say in their own way in a GGUF file. Imports no torch."""

from __future__ import annotations

from quintet.executor.checkpoints.gguf.common_values import Values, common, num_layers
from quintet.executor.checkpoints.gguf.dense_values import granite, slides
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata

_SIGMOID = 2
"""How ``expert_gating_func`` calls scores that are logistic functions."""


def experts(said: GgufMetadata, renormalise: bool = False) -> Values:
    """``renormalise``: what llama.cpp does in this architecture where its file does not say."""
    return {
        "num_experts": said.get("expert_count"),
        "num_experts_per_tok": said.get("expert_used_count"),
        "moe_intermediate_size": said.once("expert_feed_forward_length"),
        "n_shared_experts": said.get("expert_shared_count", 0),
        "shared_expert_intermediate_size": said.get("expert_shared_feed_forward_length"),
        "n_group": said.get("expert_group_count", 1),
        "topk_group": said.get("expert_group_used_count", 1),
        "norm_topk_prob": said.get("expert_weights_norm", renormalise),
        "routed_scaling_factor": said.get("expert_weights_scale") or 1.0,
        "first_k_dense_replace": said.get("leading_dense_block_count", 0),
    }


def mixtral(said: GgufMetadata) -> Values:
    """Mixtral, as far as a file of Llama is one of it."""
    return {
        "num_local_experts": said.get("expert_count"),
        "num_experts_per_tok": said.get("expert_used_count"),
    }


def llama_name(said: GgufMetadata) -> str:
    """Mixtral's files have the name, too."""
    return "MixtralForCausalLM" if said.get("expert_count") else "LlamaForCausalLM"


def deepseek2_name(said: GgufMetadata) -> str:
    """All that attends over latents as DeepSeek V2 does has the name: V3 and its heirs, and Youtu-LLM, which has no experts."""
    if not said.get("expert_count"):
        return "YoutuForCausalLM"
    corrected = said.has("exp_probs_b.bias")
    kind = said.get("expert_gating_func") or (_SIGMOID if corrected else 0)
    return "DeepseekV3ForCausalLM" if kind == _SIGMOID else "DeepseekV2ForCausalLM"


def deepseek2(said: GgufMetadata) -> Values:
    """DeepSeek V2 and V3. Where a file has ``_mla`` keys, those without are of latents."""
    groups = said.get("expert_group_count", 1)
    return {
        **experts(said),
        **_latent(said, "_mla" if said.get("attention.key_length_mla") else ""),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


def minicpm3(said: GgufMetadata) -> Values:
    """MiniCPM 3, whose files do not say its factors."""
    head = said.whole("embedding_length") // max(said.whole("attention.head_count"), 1)
    return {
        **_latent(said, ""),
        "v_head_dim": head,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _latent(said: GgufMetadata, ending: str) -> Values:
    rotated = said.whole("rope.dimension_count")
    ranks = {"kv_lora_rank": said.get("attention.kv_lora_rank")}
    q_rank = said.get("attention.q_lora_rank") if said.has("attn_q_a.weight") else None
    plain = said.whole(f"attention.key_length{ending}") - rotated
    return {
        **ranks,
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": said.get(f"attention.value_length{ending}"),
        "head_dim": None,
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
        "attention_bias": False,
    }


def dots1(said: GgufMetadata) -> Values:
    """dots.llm1: none of its layers slides."""
    return {**experts(said), "layer_types": ["full_attention"] * num_layers(said)}


def ernie(said: GgufMetadata) -> Values:
    """ERNIE 4.5 of experts."""
    return {
        **experts(said),
        "moe_layer_interval": said.get("interleave_moe_layer_step", 1),
        "moe_layer_start_index": said.get("leading_dense_block_count", 0),
    }


def hunyuan(said: GgufMetadata) -> Values:
    """Hunyuan-A13B: its shared expert may be as wide as several."""
    width = max(said.once("expert_feed_forward_length") or 1, 1)
    shared = said.whole("expert_shared_feed_forward_length", width)
    return {**experts(said), "num_shared_expert": shared // width, "use_qk_norm": True}


def glm4(said: GgufMetadata) -> Values:
    """GLM-4.5 and Solar Open."""
    return {**experts(said), "use_qk_norm": said.has("attn_q_norm.weight")}


def exaone(said: GgufMetadata) -> Values:
    """K-EXAONE."""
    return {**experts(said), **slides(said)}


def bailing(said: GgufMetadata) -> Values:
    """Ling 1 and 2."""
    biased = said.has("attn_qkv.bias", "attn_q.bias")
    return {**experts(said), "use_qkv_bias": biased, "use_bias": said.has("attn_output.bias")}


def minimax(said: GgufMetadata) -> Values:
    """MiniMax M2: it counts the numbers that are rotated."""
    width = said.once("expert_feed_forward_length")
    rotated = said.get("rope.dimension_count")
    return {**experts(said), "intermediate_size": width, "rotary_dim": rotated, "partial_rotary_factor": None}


def granite_name(said: GgufMetadata) -> str:
    """Granite 4 without Mamba and without experts has the name, too."""
    return "GraniteMoeSharedForCausalLM" if said.get("expert_count") else "GraniteForCausalLM"


def granite_moe(said: GgufMetadata) -> Values:
    """Granite 3 of experts."""
    shared = said.get("expert_shared_feed_forward_length", 0)
    return {**granite(said), **experts(said), "shared_intermediate_size": shared}


def phi_moe(said: GgufMetadata) -> Values:
    """Phi 3.5 of experts."""
    biased = "output.bias" in said.tensors
    return {**experts(said), "lm_head_bias": biased, "sliding_window": said.get("attention.sliding_window")}


def gpt_oss(said: GgufMetadata) -> Values:
    """gpt-oss. Where its rotation begins and ends to be stretched is not rounded."""
    scaling = common(said)["rope_scaling"]
    return {
        **experts(said),
        **slides(said),
        "intermediate_size": said.once("expert_feed_forward_length"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def llama4(said: GgufMetadata) -> Values:
    """Llama 4, Scout and Maverick. Of the experts' number follows whether queries and keys are normed."""
    return {
        **experts(said),
        "intermediate_size": said.once("expert_feed_forward_length"),
        "intermediate_size_mlp": said.get("feed_forward_length"),
        "interleave_moe_layer_step": said.get("interleave_moe_layer_step"),
        "use_qk_norm": said.get("expert_count") != 128,
    }
