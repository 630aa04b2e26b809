"""GGUF files of folders with a generated vocabulary, written as `quintet quantize` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quintet.executor.checkpoints.gguf.writing.hf_config import usual
from quintet.executor.checkpoints.gguf.writing.model import plan_of, write_gguf
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES


def write_model(folder: Path, target: Path, mix: str = "f32") -> None:
    """Write a folder's model; each token is the text of its id."""
    write_gguf(plan_of(folder, MIXES[mix]), target, names_of_ids(folder))


def names_of_ids(folder: Path) -> dict[str, Any]:
    """Return a vocabulary of ids as text."""
    config = usual(json.loads((folder / "config.json").read_text()))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [1] * config["vocab_size"],
        "tokenizer.ggml.merges": ["t o"],  # llama.cpp requires at least one
        "tokenizer.ggml.add_bos_token": False,
    }
