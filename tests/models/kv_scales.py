"""Checkpoints that say how keys and values are kept in fp8, made of any row."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.random_checkpoints import Logits, Row, side_by_side

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
SECTION = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
SCALES = [(0.004, 0.011), (0.013, 0.0027)]
"""Of keys and values of each layer: some numbers are beyond 448 of them."""


def with_scales(row: Row) -> Row:
    """Return the row with scales in its checkpoint, and with keys and values rounded by torch in its reference."""

    def make(folder: Path) -> Logits:
        row.make(folder)
        card = json.loads((folder / "config.json").read_text())
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        (folder / "config.json").write_text(json.dumps(card | {"quantization_config": SECTION}))
        tensors = load_file(folder / "model.safetensors")
        for i, (key, value) in enumerate(SCALES):
            tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor([key])
            tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor(value)
        save_file(tensors, folder / "model.safetensors")
        return side_by_side(model.float().eval())

    return Row(make)
