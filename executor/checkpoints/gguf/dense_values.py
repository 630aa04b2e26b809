"""Architecture-specific config values of attention models with plain feed-forwards. Imports no torch."""

from __future__ import annotations

import numpy as np

from quintet.executor.checkpoints.gguf.common_values import Values, common, layer_kinds, num_layers
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata


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
