"""Write GGUF files with random bf16 weights for the architectures of llama.cpp. Runs in llama.cpp's environment.

The time of a step depends on shapes alone. So a file has only the metadata and tensors that llama.cpp needs. Names are those of
the GGUF specification. The vocabulary has a size, but no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ConfigJson = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors, by name, output dimension first. Tensors of one dimension are float32."""

_NUM_RANDOM = 1 << 22
"""Random numbers that are drawn; larger tensors repeat them."""


def write(hf_config: ConfigJson, target: Path) -> None:
    """Write a bf16 GGUF file for a config. Raises KeyError for an unsupported ``model_type``."""
    arch, add_metadata, shapes = KINDS[hf_config["model_type"]]
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(hf_config["vocab_size"])
    writer.add_context_length(hf_config["max_position_embeddings"])
    writer.add_embedding_length(hf_config["hidden_size"])
    writer.add_block_count(hf_config["num_hidden_layers"])
    writer.add_head_count(hf_config["num_attention_heads"])
    writer.add_head_count_kv(1 if "kv_lora_rank" in hf_config else _kv_heads(hf_config))
    writer.add_feed_forward_length(hf_config["intermediate_size"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    add_metadata(writer, hf_config)
    normal = np.random.default_rng(0).standard_normal(_NUM_RANDOM).astype(np.float32) * 0.02
    upper = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for name, shape in shapes(hf_config).items():
        if len(shape) == 1 or name.endswith(_FLOAT32_SUFFIXES):
            writer.add_tensor(name, np.resize(np.abs(normal) + np.float32(0.5), shape))
        else:
            content = np.resize(upper, shape).view(np.uint8)
            writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_FLOAT32_SUFFIXES = ("ssm_a", "ssm_d", "ssm_conv1d.weight", "ssm_norm.weight", "ffn_gate_inp.weight")


def _kv_heads(hf_config: ConfigJson) -> int:
    return int(hf_config["num_key_value_heads"] or hf_config["num_attention_heads"])


def _head_dim(hf_config: ConfigJson) -> int:
    return int(hf_config["hidden_size"] // hf_config["num_attention_heads"])


def _outer_tensors(hf_config: ConfigJson) -> Shapes:
    hidden, vocab_size = hf_config["hidden_size"], hf_config["vocab_size"]
    return {
        "token_embd.weight": (vocab_size, hidden),
        "output.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }


def _repeat_layers(hf_config: ConfigJson, shapes: Shapes) -> Shapes:
    return {
        f"blk.{layer}.{name}": shape
        for layer in range(hf_config["num_hidden_layers"])
        for name, shape in shapes.items()
    }


def _attention(hf_config: ConfigJson) -> Shapes:
    hidden, keys = hf_config["hidden_size"], _kv_heads(hf_config) * _head_dim(hf_config)
    return {
        "attn_q.weight": (hidden, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, hidden),
    }


def _gated(hf_config: ConfigJson) -> Shapes:
    hidden, width = hf_config["hidden_size"], hf_config["intermediate_size"]
    return {
        "ffn_gate.weight": (width, hidden),
        "ffn_up.weight": (width, hidden),
        "ffn_down.weight": (hidden, width),
    }


def _norms(hf_config: ConfigJson, *names: str) -> Shapes:
    return {f"{name}.weight": (hf_config["hidden_size"],) for name in names}


def _llama(hf_config: ConfigJson, *extra: Shapes) -> Shapes:
    layer = _attention(hf_config) | _gated(hf_config) | _norms(hf_config, "attn_norm", "ffn_norm")
    for shapes in extra:
        layer |= shapes
    return _outer_tensors(hf_config) | _repeat_layers(hf_config, layer)


def _qwen3(hf_config: ConfigJson) -> Shapes:
    return _llama(hf_config, {f"attn_{part}_norm.weight": (_head_dim(hf_config),) for part in "qk"})


def _olmo2(hf_config: ConfigJson) -> Shapes:
    layer = _attention(hf_config) | _gated(hf_config)
    layer |= _norms(hf_config, "post_attention_norm", "post_ffw_norm", "attn_q_norm")
    layer["attn_k_norm.weight"] = (_kv_heads(hf_config) * _head_dim(hf_config),)
    return _outer_tensors(hf_config) | _repeat_layers(hf_config, layer)


def _gemma2(hf_config: ConfigJson) -> Shapes:
    shapes = _llama(hf_config, _norms(hf_config, "post_attention_norm", "post_ffw_norm"))
    del shapes["output.weight"]
    return shapes


def _gpt2_like(hf_config: ConfigJson) -> Shapes:
    """Return the tensors of GPT-2 and similar architectures: all layers have biases, QKV is fused, the MLP has no gate."""
    hidden, width = hf_config["hidden_size"], hf_config["intermediate_size"]
    matrices = {
        "attn_qkv": (3 * hidden, hidden),
        "attn_output": (hidden, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    layer: Shapes = _norms(hf_config, "attn_norm", "ffn_norm")
    layer |= {f"{name}.bias": (hidden,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in matrices.items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return _outer_tensors(hf_config) | {"output_norm.bias": (hidden,)} | _repeat_layers(hf_config, layer)


def _gpt2(hf_config: ConfigJson) -> Shapes:
    return _gpt2_like(hf_config) | {
        "position_embd.weight": (hf_config["n_positions"], hf_config["hidden_size"])
    }


def _bloom(hf_config: ConfigJson) -> Shapes:
    return _gpt2_like(hf_config) | {
        f"token_embd_norm.{part}": (hf_config["hidden_size"],) for part in ("weight", "bias")
    }


def _experts(hf_config: ConfigJson, num: int, width: int) -> Shapes:
    hidden = hf_config["hidden_size"]
    return {
        "ffn_gate_inp.weight": (num, hidden),
        "ffn_gate_exps.weight": (num, width, hidden),
        "ffn_up_exps.weight": (num, width, hidden),
        "ffn_down_exps.weight": (num, hidden, width),
    }


def _mixtral(hf_config: ConfigJson) -> Shapes:
    layer = _attention(hf_config) | _norms(hf_config, "attn_norm", "ffn_norm")
    layer |= _experts(hf_config, hf_config["num_local_experts"], hf_config["intermediate_size"])
    return _outer_tensors(hf_config) | _repeat_layers(hf_config, layer)


def _deepseek2(hf_config: ConfigJson) -> Shapes:
    hidden, heads, latent = (
        hf_config["hidden_size"],
        hf_config["num_attention_heads"],
        hf_config["kv_lora_rank"],
    )
    nope, rope_dim, value = (
        hf_config["qk_nope_head_dim"],
        hf_config["qk_rope_head_dim"],
        hf_config["v_head_dim"],
    )
    layer: Shapes = {
        "attn_q_a.weight": (hf_config["q_lora_rank"], hidden),
        "attn_q_a_norm.weight": (hf_config["q_lora_rank"],),
        "attn_q_b.weight": (heads * (nope + rope_dim), hf_config["q_lora_rank"]),
        "attn_kv_a_mqa.weight": (latent + rope_dim, hidden),
        "attn_kv_a_norm.weight": (latent,),
        "attn_k_b.weight": (heads, latent, nope),
        "attn_v_b.weight": (heads, value, latent),
        "attn_output.weight": (hidden, heads * value),
    }
    layer |= _norms(hf_config, "attn_norm", "ffn_norm")
    width, num_dense = hf_config["moe_intermediate_size"], hf_config["first_k_dense_replace"]
    shared = width * hf_config["n_shared_experts"]
    routed = _experts(hf_config, hf_config["n_routed_experts"], width) | {
        "ffn_gate_shexp.weight": (shared, hidden),
        "ffn_up_shexp.weight": (shared, hidden),
        "ffn_down_shexp.weight": (hidden, shared),
    }
    shapes = _outer_tensors(hf_config)
    for index in range(hf_config["num_hidden_layers"]):
        layer_shapes = layer | (_gated(hf_config) if index < num_dense else routed)
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


def _mamba2(hf_config: ConfigJson) -> Shapes:
    hidden, heads = hf_config["hidden_size"], hf_config["num_heads"]
    inner = heads * hf_config["head_dim"]
    mixed = inner + 2 * hf_config["n_groups"] * hf_config["state_size"]
    layer: Shapes = {
        "ssm_in.weight": (inner + mixed + heads, hidden),
        "ssm_conv1d.weight": (mixed, 4),
        "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (hf_config["n_groups"], inner // hf_config["n_groups"]),
        "ssm_out.weight": (hidden, inner),
    }
    return _outer_tensors(hf_config) | _repeat_layers(hf_config, layer | _norms(hf_config, "attn_norm"))


def _add_rope(writer: Any, hf_config: ConfigJson) -> None:
    writer.add_rope_dimension_count(_head_dim(hf_config))
    writer.add_rope_freq_base(10000.0)


def _add_gpt_neox(writer: Any, hf_config: ConfigJson) -> None:
    _add_rope(writer, hf_config)
    writer.add_parallel_residual(True)


def _add_gemma2(writer: Any, hf_config: ConfigJson) -> None:
    _add_rope(writer, hf_config)
    writer.add_key_length(hf_config["head_dim"])
    writer.add_value_length(hf_config["head_dim"])
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(hf_config["sliding_window"])


def _add_moe(writer: Any, hf_config: ConfigJson) -> None:
    _add_rope(writer, hf_config)
    writer.add_expert_count(hf_config["num_local_experts"])
    writer.add_expert_used_count(hf_config["num_experts_per_tok"])


def _add_mla(writer: Any, hf_config: ConfigJson) -> None:
    rope_dim, latent = hf_config["qk_rope_head_dim"], hf_config["kv_lora_rank"]
    writer.add_key_length(latent + rope_dim)
    writer.add_value_length(latent)
    writer.add_key_length_mla(hf_config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(hf_config["v_head_dim"])
    writer.add_q_lora_rank(hf_config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_leading_dense_block_count(hf_config["first_k_dense_replace"])
    writer.add_expert_count(hf_config["n_routed_experts"])
    writer.add_expert_used_count(hf_config["num_experts_per_tok"])
    writer.add_expert_shared_count(hf_config["n_shared_experts"])
    writer.add_expert_feed_forward_length(hf_config["moe_intermediate_size"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _add_ssm(writer: Any, hf_config: ConfigJson) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(hf_config["num_heads"] * hf_config["head_dim"])
    writer.add_ssm_state_size(hf_config["state_size"])
    writer.add_ssm_time_step_rank(hf_config["num_heads"])
    writer.add_ssm_group_count(hf_config["n_groups"])


def _add_nothing(writer: Any, hf_config: ConfigJson) -> None:
    pass


KINDS: dict[str, tuple[str, Callable[[Any, ConfigJson], None], Callable[[ConfigJson], Shapes]]] = {
    "llama": ("llama", _add_rope, _llama),
    "mistral": ("llama", _add_rope, _llama),
    "qwen3": ("qwen3", _add_rope, _qwen3),
    "olmo2": ("olmo2", _add_rope, _olmo2),
    "gpt2": ("gpt2", _add_nothing, _gpt2),
    "bloom": ("bloom", _add_nothing, _bloom),
    "gpt_neox": ("gptneox", _add_gpt_neox, _gpt2_like),
    "gemma2": ("gemma2", _add_gemma2, _gemma2),
    "mixtral": ("llama", _add_moe, _mixtral),
    "deepseek_v2": ("deepseek2", _add_mla, _deepseek2),
    "mamba2": ("mamba2", _add_ssm, _mamba2),
}
"""By ``model_type``: architecture in llama.cpp, writer of its metadata, tensors. llama.cpp's Llama has no sliding window, which
makes no difference at the measured context length."""
