"""What models with attention and plain feed-forwards say in their own way in a GGUF file. Imports no torch."""

from __future__ import annotations

import numpy as np

from quintet.executor.checkpoints.gguf.common_values import Values, common, layer_kinds, num_layers
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata


def _gemma_cap(said: GgufMetadata) -> Values:
    heads, hidden = max(said.whole("attention.head_count"), 1), said.whole("embedding_length")
    largest = num_layers(said) == (46 if said.architecture == "gemma2" else 62)
    return {
        "query_pre_attn_scalar": hidden / heads if largest else said.get("attention.key_length"),
        "attn_logit_softcapping": said.get("attn_logit_softcapping"),
        "final_logit_softcapping": said.get("final_logit_softcapping"),
        "sliding_window": said.get("attention.sliding_window"),
    }


def gemma2(said: GgufMetadata) -> Values:
    """Gemma 2."""
    return _gemma_cap(said)


def gemma3(said: GgufMetadata) -> Values:
    """Gemma 3: layers that slide have a rotation of their own."""
    local = said.get("rope.freq_base_swa", 10000.0)
    return {**gemma2(said), "rope_local_base_freq": local, **layer_kinds(said)}


def phi3(said: GgufMetadata) -> Values:
    """Phi 3 and 4."""
    return {"sliding_window": said.get("attention.sliding_window") or None}


def bitnet(said: GgufMetadata) -> Values:
    """BitNet b1.58. Files do not say the activation: of the paper's first models, which llama.cpp computes, it is SiLU; 2B4T, the
    one of another rotation, has squared ReLU.
    """
    is_2b4t = said.get("rope.freq_base") == 500000.0
    return {"hidden_act": "relu2" if is_2b4t else "silu"}


def gpt2(said: GgufMetadata) -> Values:
    """GPT-2: positions are a table."""
    return {
        "max_position_embeddings": said.rows("position_embd.weight"),
        "n_inner": said.get("feed_forward_length"),
    }


def parallel(said: GgufMetadata) -> Values:
    """GPT-NeoX and StableLM."""
    return {
        "use_parallel_residual": said.get("use_parallel_residual", True),
        "use_qkv_bias": said.has("attn_q.bias"),
        "qk_layernorm": said.has("attn_q_norm.weight"),
    }


def falcon(said: GgufMetadata) -> Values:
    """Falcon 7B, 40B and 11B."""
    heads, kv_heads = said.whole("attention.head_count"), said.whole("attention.head_count_kv", 1)
    both = said.has("attn_norm_2.weight")
    return {
        "new_decoder_architecture": both or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if both else 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": said.get("feed_forward_length"),
        "bias": said.has("attn_qkv.bias"),
    }


def starcoder(said: GgufMetadata) -> Values:
    """StarCoder 1."""
    return {**gpt2(said), "multi_query": said.whole("attention.head_count_kv", 1) == 1}


def cohere(said: GgufMetadata) -> Values:
    """Command R and its heirs."""
    return {
        "logit_scale": said.get("logit_scale"),
        "use_qk_norm": said.has("attn_q_norm.weight"),
        **slides(said),
    }


def granite(said: GgufMetadata) -> Values:
    """Granite's factors."""
    return {
        "attention_multiplier": said.get("attention.scale"),
        "embedding_multiplier": said.get("embedding_scale"),
        "residual_multiplier": said.get("residual_scale"),
        "logits_scaling": said.get("logit_scale"),
    }


def minicpm(said: GgufMetadata) -> Values:
    """MiniCPM's files have the factors that its card derives from others."""
    return {
        "scale_emb": said.get("embedding_scale", 12.0),
        "scale_depth": said.real("residual_scale", 1.4 / num_layers(said) ** 0.5) * num_layers(said) ** 0.5,
        "dim_model_base": round(said.whole("embedding_length") / max(said.real("logit_scale", 1.0), 1e-6)),
    }


def olmo2_name(said: GgufMetadata) -> str:
    """OLMo 3's files have the name, too."""
    return "Olmo3ForCausalLM" if said.get("attention.sliding_window") else "Olmo2ForCausalLM"


def slides(said: GgufMetadata) -> Values:
    """Say how far layers see that do not see everything."""
    return {"sliding_window": said.get("attention.sliding_window"), **layer_kinds(said)}


def baichuan(said: GgufMetadata) -> Values:
    """Baichuan: that of 40 layers, 13B, does not rotate. The output layer of Baichuan 2 is normed before it is converted."""
    context = said.get("context_length")
    return {
        "max_position_embeddings": None if num_layers(said) == 40 else context,
        "model_max_length": context,
    }


def apertus(said: GgufMetadata) -> Values:
    """Apertus: its learned activations are settings of the file, below no architecture's name, one for all layers perhaps."""
    count = num_layers(said)
    curves = {}
    for key in ("alpha_p", "alpha_n", "beta", "eps"):
        value = said.parts.metadata.get(f"xielu.{key}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        curves[key] = values if isinstance(values, list) else [values] * count
    scaling = common(said)["rope_scaling"] or {"rope_type": "default"}
    return {"xielu_curves": curves, "rope_scaling": scaling}


def qwen1(said: GgufMetadata) -> Values:
    """Qwen 1: half of what it calls its width; nothing of how contexts beyond its training are stretched."""
    return {"kv_channels": said.get("attention.key_length"), "seq_length": said.get("context_length")}


def chatglm(said: GgufMetadata) -> Values:
    """ChatGLM 2 and 3, GLM-4-9B."""
    return {
        "multi_query_attention": True,
        "ffn_hidden_size": said.get("feed_forward_length"),
        "layernorm_epsilon": said.get("attention.layer_norm_rms_epsilon"),
        "add_qkv_bias": said.has("attn_qkv.bias", "attn_q.bias"),
    }


def mpt(said: GgufMetadata) -> Values:
    """MPT: learned positions where there is no ALiBi."""
    octaves = said.real("attention.max_alibi_bias", 0.0)
    return {
        "attn_config": {
            "alibi": octaves > 0.0,
            "alibi_bias_max": octaves or None,
            "clip_qkv": said.get("attention.clamp_kqv"),
            "qk_ln": said.has("attn_q_norm.weight"),
        },
        "no_bias": not said.has("attn_qkv.bias"),
        "expansion_ratio": said.whole("feed_forward_length") // max(said.whole("embedding_length"), 1),
    }


def ministral3(said: GgufMetadata) -> Values:
    """Ministral 3, whose queries of far positions are scaled up."""
    usual = common(said)
    rope = {**(usual["rope_scaling"] or {}), "rope_theta": usual["rope_theta"]}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": said.get("attention.temperature_scale")}}


def deci(said: GgufMetadata) -> Values:
    """Nemotron-NAS: layers without attention, or without a feed-forward."""
    count = num_layers(said)
    heads, kv_heads, widths = (
        said.each(key, count)
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    if any(each and not shared for each, shared in zip(heads, kv_heads, strict=True)):
        raise said.wrong("attention.head_count_kv", "0 only where head_count is: linear layers are not known")
    blocks = [
        {
            "attention": {"n_heads_in_group": each // shared} if shared else {"no_op": True},
            "ffn": {"intermediate_size": width} if width else {"no_op": True},
        }
        for each, shared, width in zip(heads, kv_heads, widths, strict=True)
    ]
    return {"block_configs": blocks, "num_key_value_heads": None, "intermediate_size": None}
