"""Llama and families of its shape."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.checkpoints.renamed import renamed
from tests.models.random_checkpoints import Logits, Row, batched_logits, of_transformers


def nas(folder: Path) -> Logits:
    """Write a pruned Llama: reference matrices are 0 where a layer lacks a block or a part of its width.

    Its key heads are equal where one is left.
    """
    of_transformers("LlamaConfig", num_hidden_layers=4, intermediate_size=512).make(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tensors = load_file(folder / "model.safetensors")
    blocks: list[dict[str, Any]] = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 12.0}} for _ in range(4)
    ]
    first, second, third = (model.model.layers[i] for i in range(3))
    with torch.no_grad():
        blocks[0]["attention"] = {"no_op": True}
        first.self_attn.o_proj.weight.zero_()
        blocks[1]["ffn"] = {"no_op": True}
        second.mlp.down_proj.weight.zero_()
        blocks[2] = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 6.0}}
        third.mlp.down_proj.weight[:, 256:] = 0
        for name in ("k_proj", "v_proj"):
            weight = getattr(third.self_attn, name).weight
            weight[16:] = weight[:16]
            tensors[f"model.layers.2.self_attn.{name}.weight"] = weight[:16].clone()
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.2.mlp.{name}.weight"] = tensors[f"model.layers.2.mlp.{name}.weight"][
            :256
        ].clone()
    down = tensors["model.layers.2.mlp.down_proj.weight"]
    tensors["model.layers.2.mlp.down_proj.weight"] = down[:, :256].clone()
    gone = (
        "layers.0.self_attn.",
        "layers.0.input_layernorm.",
        "layers.1.mlp.",
        "layers.1.post_attention_layernorm.",
    )
    kept = {name: tensor for name, tensor in tensors.items() if not any(each in name for each in gone)}
    save_file(kept, folder / "model.safetensors")
    hf_config = json.loads((folder / "config.json").read_bytes())
    hf_config |= {"architectures": ["DeciLMForCausalLM"], "block_configs": blocks}
    hf_config |= {"num_key_value_heads": None, "intermediate_size": None}
    (folder / "config.json").write_text(json.dumps(hf_config))

    return batched_logits(model)


ROWS: dict[str, Row] = {
    "nemotron nas": Row(nas),
    "llama": of_transformers("LlamaConfig"),
    "bitnet": of_transformers("BitNetConfig"),
    "llama, as many KV heads as heads": of_transformers("LlamaConfig", num_key_value_heads=4),
    "llama, biases": of_transformers("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama, one KV head, tied": of_transformers(
        "LlamaConfig", num_key_value_heads=1, tie_word_embeddings=True
    ),
    "mistral": of_transformers("MistralConfig", sliding_window=None),
    "mistral, window": of_transformers("MistralConfig", sliding_window=11),
    "qwen2": of_transformers("Qwen2Config"),
    "qwen2, window": of_transformers(
        "Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2, as mimo": renamed(of_transformers("Qwen2Config"), {"architectures": ["MiMoForCausalLM"]}),
    "qwen3": of_transformers("Qwen3Config", head_dim=32),
    "qwen3, biases, tied": of_transformers(
        "Qwen3Config", head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}
