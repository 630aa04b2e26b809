"""Tiny random checkpoints in the formats of other tools, each with its dequantized model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from bench.quantization.layers import Written, in_format
from safetensors.torch import load_file, save_file

SETTINGS = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 192,  # one whole group of 128 and a partial one
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def write(
    folder: Path, written: Written, config: transformers.PretrainedConfig | None = None
) -> tuple[Path, Path]:
    """Write a quantized checkpoint and its dequantized numbers; return both folders."""
    torch.manual_seed(1)
    config = config or transformers.LlamaConfig(**SETTINGS)  # type: ignore[arg-type]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    quantized, plain = folder / "quantized", folder / "plain"
    model.save_pretrained(plain)
    kept, numbers = in_format(written, load_file(plain / "model.safetensors"))
    hf_config = json.loads((plain / "config.json").read_bytes())
    for where, tensors, section in (
        (quantized, kept, {"quantization_config": written.section}),
        (plain, numbers, {}),
    ):
        where.mkdir(exist_ok=True)
        save_file(tensors, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(hf_config | section))
        (where / "tokenizer.json").write_text("{}")
    return quantized, plain
