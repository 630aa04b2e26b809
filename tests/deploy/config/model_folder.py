"""Small model folders for tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a folder: ``config.json`` is `CONFIG` with ``changes`` (None removes a key)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def write_weights(path: Path, shapes: dict[str, list[int]], bytes_per_number: int = 2) -> None:
    """Write a safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = bytes_per_number
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))
