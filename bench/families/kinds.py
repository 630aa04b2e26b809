"""Configs of a small model of each kind of family, and of a Llama that moves as many bytes per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "windows": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256},
    "head norms": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "norms behind": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "learned positions": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 1024,
        "intermediate_size": 4096,
        "n_layer": 16,
        "n_head": 16,
        "n_positions": 2048,
        "num_key_value_heads": None,
    },
    "ALiBi": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "intermediate_size": 4096,
        "n_layer": 16,
        "n_head": 16,
        "num_key_value_heads": None,
    },
    "parallel": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_key_value_heads": None,
    },
    "soft caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 704,
        "first_k_dense_replace": 1,
    },
    "state": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 32,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
    },
    "hybrid": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": [3, 7, 11, 15],
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
    "delta rule": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "sinks, experts": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 256,
    },
    "by transformers": {"architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa"},
}
"""Differences from `_SMALL`, by kind."""


def hf_config_of(kind: str, dtype: str) -> dict[str, Any]:
    """Return the HF config of a kind."""
    return _SMALL | {"dtype": dtype, "tie_word_embeddings": False} | KINDS[kind]


BITS = {"none": 16.0, "int8": 8.0, "w8a8": 8.0, "int4": 4.125}
"""Bits of a layer's weight, by quantization. With int4 the output layer has 8 bits. For float32, "none" is 32 bits."""


def llama_hf_config(
    dtype: str, quantization: str, like: Mapping[str, Any], step_bytes: int, num_keys: int
) -> dict[str, Any]:
    """Return the config of a Llama with the KV heads of ``like`` and a decode step that moves about ``step_bytes``.

    num_keys: number of keys that all requests of the step read. The width of the feed-forward layers is adapted; it is a multiple
    of 32.
    """
    hf_config = hf_config_of("llama", dtype)
    heads, hidden, layers = (
        hf_config["num_attention_heads"],
        hf_config["hidden_size"],
        hf_config["num_hidden_layers"],
    )
    kv_heads, size = like["num_key_value_heads"] or heads, 4 if dtype == "float32" else 2
    weight_bytes = BITS[quantization] / 16 * size
    keys = 2 * num_keys * kv_heads * (hidden // heads) * size * layers
    logits = hf_config["vocab_size"] * hidden * (weight_bytes if quantization == "none" else 1)
    attention = layers * 2 * hidden * hidden * (1 + kv_heads / heads) * weight_bytes
    width = (step_bytes - keys - logits - attention) / (3 * layers * hidden * weight_bytes)
    return hf_config | {"num_key_value_heads": kv_heads, "intermediate_size": max(1, round(width / 32)) * 32}
