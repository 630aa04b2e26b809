"""Architecture-specific config values of attention models: with plain feed-forwards, then with experts or latent
attention. Imports no torch."""

from __future__ import annotations

import numpy as np

from quintet.executor.checkpoints.gguf.common_values import GRANITE, Values, common, layer_kinds, num_layers
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata

_SIGMOID = 2
"""``expert_gating_func`` of sigmoid scores."""


def gemma2(metadata: GgufMetadata) -> Values:
    """Return the values of Gemma 2."""
    heads, hidden = max(metadata.whole("attention.head_count"), 1), metadata.whole("embedding_length")
    largest = num_layers(metadata) == (46 if metadata.architecture == "gemma2" else 62)
    return {
        "query_pre_attn_scalar": hidden / heads if largest else metadata.get("attention.key_length"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": metadata.get("attention.sliding_window"),
    }


def gemma3(metadata: GgufMetadata) -> Values:
    """Return the values of Gemma 3: sliding layers have a separate rotation base."""
    local = metadata.get("rope.freq_base_swa", 10000.0)
    return {**gemma2(metadata), "rope_local_base_freq": local, **layer_kinds(metadata)}


def bitnet(metadata: GgufMetadata) -> Values:
    """Return the values of BitNet b1.58.

    Files lack the activation: SiLU for the paper's first models (as in llama.cpp), squared ReLU for 2B4T, which is
    recognised by its rotation base.
    """
    is_2b4t = metadata.get("rope.freq_base") == 500000.0
    return {"hidden_act": "relu2" if is_2b4t else "silu"}


def gpt2(metadata: GgufMetadata) -> Values:
    """Return the values of GPT-2; positions are a table."""
    return {
        "max_position_embeddings": metadata.rows("position_embd.weight"),
        "n_inner": metadata.get("feed_forward_length"),
    }


def parallel(metadata: GgufMetadata) -> Values:
    """Return the values of GPT-NeoX and StableLM."""
    return {
        "use_parallel_residual": metadata.get("use_parallel_residual", True),
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
    }


def falcon(metadata: GgufMetadata) -> Values:
    """Return the values of Falcon 7B, 40B and 11B."""
    heads, kv_heads = metadata.whole("attention.head_count"), metadata.whole("attention.head_count_kv", 1)
    both = metadata.has("attn_norm_2.weight")
    return {
        "new_decoder_architecture": both or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if both else 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": metadata.get("feed_forward_length"),
        "bias": metadata.has("attn_qkv.bias"),
    }


def cohere(metadata: GgufMetadata) -> Values:
    """Return the values of Command R and its successors."""
    is_normed = metadata.has("attn_q_norm.weight")
    return {"logit_scale": metadata.get("logit_scale"), "use_qk_norm": is_normed, **slides(metadata)}


def minicpm(metadata: GgufMetadata) -> Values:
    """Return the values of MiniCPM; its files have derived factors, its config the original ones."""
    hidden, root = metadata.whole("embedding_length"), num_layers(metadata) ** 0.5
    return {
        "scale_emb": metadata.get("embedding_scale", 12.0),
        "scale_depth": metadata.real("residual_scale", 1.4 / root) * root,
        "dim_model_base": round(hidden / max(metadata.real("logit_scale", 1.0), 1e-6)),
    }


def slides(metadata: GgufMetadata) -> Values:
    """Return the sliding window and the sliding layers."""
    return {"sliding_window": metadata.get("attention.sliding_window"), **layer_kinds(metadata)}


def baichuan(metadata: GgufMetadata) -> Values:
    """Return the values of Baichuan; the 40-layer model (13B) uses ALiBi. The converter normalises Baichuan 2's output
    layer."""
    context = metadata.get("context_length")
    return {
        "max_position_embeddings": None if num_layers(metadata) == 40 else context,
        "model_max_length": context,
    }


def apertus(metadata: GgufMetadata) -> Values:
    """Return the values of Apertus; learned activations are keys without an architecture prefix, one value or one for
    each layer."""
    count = num_layers(metadata)
    curves = {}
    for key in ("alpha_p", "alpha_n", "beta", "eps"):
        value = metadata.parts.metadata.get(f"xielu.{key}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        curves[key] = values if isinstance(values, list) else [values] * count
    scaling = common(metadata)["rope_scaling"] or {"rope_type": "default"}
    return {"xielu_curves": curves, "rope_scaling": scaling}


def chatglm(metadata: GgufMetadata) -> Values:
    """Return the values of ChatGLM 2 and 3 and GLM-4-9B."""
    return {
        "multi_query_attention": True,
        "ffn_hidden_size": metadata.get("feed_forward_length"),
        "layernorm_epsilon": metadata.get("attention.layer_norm_rms_epsilon"),
        "add_qkv_bias": metadata.has("attn_qkv.bias", "attn_q.bias"),
    }


def mpt(metadata: GgufMetadata) -> Values:
    """Return the values of MPT; learned positions without ALiBi."""
    octaves = metadata.real("attention.max_alibi_bias", 0.0)
    return {
        "attn_config": {
            "alibi": octaves > 0.0,
            "alibi_bias_max": octaves or None,
            "clip_qkv": metadata.get("attention.clamp_kqv"),
            "qk_ln": metadata.has("attn_q_norm.weight"),
        },
        "no_bias": not metadata.has("attn_qkv.bias"),
        "expansion_ratio": metadata.whole("feed_forward_length")
        // max(metadata.whole("embedding_length"), 1),
    }


def ministral3(metadata: GgufMetadata) -> Values:
    """Return the values of Ministral 3, which scales queries at far positions."""
    usual = common(metadata)
    rope = {**(usual["rope_scaling"] or {}), "rope_theta": usual["rope_theta"]}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": metadata.get("attention.temperature_scale")}}


def deci(metadata: GgufMetadata) -> Values:
    """Return the values of Nemotron-NAS: layers without attention or without a feed-forward."""
    count = num_layers(metadata)
    heads, kv_heads, widths = (
        metadata.each(key, count)
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    if any(each and not shared for each, shared in zip(heads, kv_heads, strict=True)):
        raise metadata.wrong(
            "attention.head_count_kv",
            "0 only for layers with head_count 0; linear attention is not supported",
        )
    blocks = [
        {
            "attention": {"n_heads_in_group": each // shared} if shared else {"no_op": True},
            "ffn": {"intermediate_size": width} if width else {"no_op": True},
        }
        for each, shared, width in zip(heads, kv_heads, widths, strict=True)
    ]
    return {"block_configs": blocks, "num_key_value_heads": None, "intermediate_size": None}


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
