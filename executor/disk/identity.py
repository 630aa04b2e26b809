"""Whose blocks of KV are: a hash of all that keys and values depend on beside the tokens.

The checkpoint is told by its files' names, sizes and times, as packed weights are: reading all takes as long as loading.
Copied, they are other ones.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

import msgspec
import torch

from quintet.executor.ops.host_library import instruction_set, open_library, sources_name
from quintet.wire.config import EngineConfig
from quintet.wire.model_files import is_gguf, part_paths

SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"}
"""Weights, and what a checkpoint of a model with code of its own computes with."""

EXECUTOR = Path(__file__).parents[1]


def identity_of(config: EngineConfig, runner: str) -> bytes:
    """Return 32 bytes that differ where the same tokens could have other keys and values, or lie otherwise in a block.

    runner: who computes. Whatever else could matter and is not known to matter is in it too, such as the longest context.
    """
    model = config.model
    library = open_library()
    content = {
        "card": hashlib.sha256(model.card.encode()).hexdigest(),
        "architecture": model.architecture,
        "implementation": model.implementation,
        "weights": _weights_of(config),
        "dtype": model.dtype,
        "quantization": config.executor.quantization,
        "kv_dtype": config.cache.dtype,
        "kv": msgspec.to_builtins(model.kv),
        "max_model_len": model.max_model_len,
        "runner": runner,
        "instruction_set": "" if library is None else instruction_set(library),
        "kernels": "" if library is None else sources_name(library),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "executor": _sources_of(EXECUTOR),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def _weights_of(config: EngineConfig) -> object:
    if config.executor.load_format == "dummy":
        return config.executor.seed
    path = Path(config.model.path)
    files = part_paths(path) if is_gguf(path) else sorted(path.iterdir())
    stats = [(each.name, each.stat()) for each in files if each.suffix in SUFFIXES]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _sources_of(folder: Path) -> str:
    """Return a name of the Python that decides what the kernels compute: which rotation, which numbers a format stands for."""
    content = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()
