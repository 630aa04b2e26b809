"""Checkpoints with fp8 KV scales, made from any row."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.random_checkpoints import Logits, Row, batched_logits

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
SECTION = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
BY_HEAD = SECTION | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}
SCALES = [(0.004, 0.011), (0.013, 0.0027)]
"""Of keys and values of each layer: some numbers exceed 448 times the scale."""


def scales_of(layer: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the keys and values of each of a layer's heads, ``[num_heads, 1, 1]``; of one head: the layer's."""
    each = 1.75 ** torch.arange(num_heads, dtype=torch.float32)[:, None, None]
    key, value = SCALES[layer]
    return key * each, value * each


def with_scales(row: Row, num_heads: int = 1) -> Row:
    """Return the row with scales in its checkpoint: of its layers, or of each of their ``num_heads`` KV heads."""

    def make(folder: Path) -> Logits:
        row.make(folder)
        hf_config = json.loads((folder / "config.json").read_text())
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        (folder / "config.json").write_text(
            json.dumps(hf_config | {"quantization_config": SECTION if num_heads == 1 else BY_HEAD})
        )
        tensors = load_file(folder / "model.safetensors")
        for i in range(len(SCALES)):
            key, value = scales_of(i, num_heads)
            tensors[f"model.layers.{i}.self_attn.k_scale"] = key if num_heads > 1 else key.view(1)
            tensors[f"model.layers.{i}.self_attn.v_scale"] = value if num_heads > 1 else value.view(())
        save_file(tensors, folder / "model.safetensors")
        return batched_logits(model.float().eval())

    return Row(make)
