"""Whose blocks of KV are: a hash of all that keys and values depend on beside the tokens.

The checkpoint is told by its files' names, sizes and times, and by samples of their bytes: reading all takes as long as loading.
Copied, they are other ones. Neither inode nor time of change is in it: who owns a volume is set anew wherever it is mounted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, sources_name
from quintet.executor.distributed.parallel.shapes import places_of_stages
from quintet.wire.config import EngineConfig
from quintet.wire.model_files import is_gguf, part_paths

SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"}
"""Weights, and what a checkpoint of a model with code of its own computes with."""

SAMPLE_BYTES = 4096
MOST_SAMPLES, LEAST_SAMPLES = 256, 4
"""Of all files together about so many samples, and of each at least so many: a hundredth of a second on a disk of today."""

EXECUTOR = Path(__file__).parents[1]
SAMPLED_EVERY = 1 << 20
"""Bytes, where times tell nothing, since they are other ones on every machine."""


def identity_of(config: EngineConfig, runner: str) -> bytes:
    """Return 32 bytes that differ where the same tokens could have other keys and values, or lie otherwise in a block.

    runner: who computes. Whatever else could matter and is not known to matter is in it too, such as the longest context.
    """
    return hashlib.sha256(json.dumps(_content_of(config, runner), sort_keys=True).encode()).digest()


def parts_of(config: EngineConfig, runner: str) -> dict[str, str]:
    """Return the same by name, as hashes that servers on other machines can compare: of weights, what is in their files.

    Every tensor of more than `SAMPLED_EVERY` bytes is looked into.
    """
    content = _content_of(config, runner) | {"weights": _samples_of(config)}
    return {name: _short(json.dumps(part, sort_keys=True).encode()) for name, part in content.items()}


def whole_of(parts: Mapping[str, str]) -> bytes:
    """Return 32 bytes that differ where any of these parts do."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def digest_of(whose: bytes, key: bytes, block: memoryview) -> bytes:
    """Return the hash of a block that is *whose*, of this key: what is not this one has another."""
    digest = hashlib.sha256(whose + len(key).to_bytes(1, "little") + key)
    digest.update(block)
    return digest.digest()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _content_of(config: EngineConfig, runner: str) -> dict[str, object]:
    model = config.model
    library = open_library()
    return {
        "card": hashlib.sha256(model.card.encode()).hexdigest(),
        "architecture": model.architecture,
        "implementation": model.implementation,
        "weights": _weights_of(config),
        "dtype": model.dtype,
        "quantization": config.executor.quantization,
        "activations": config.executor.activation_dtype,
        "sum_leaves": config.executor.sum_leaves,
        **_layout_of(config),
        "kv_dtype": config.cache.dtype,
        "kv": msgspec.to_builtins(model.kv),
        "max_model_len": model.max_model_len,
        "runner": runner,
        "instruction_set": "" if library is None else instruction_set(library),
        "kernels": "" if library is None else sources_name(library),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "executor": sources(),
    }


def _layout_of(config: EngineConfig) -> dict[str, object]:
    """Return how many ranks add up, and how their parts lie in a block: each memory's of a stage, then those of the next.

    Where a stage has one memory, stages lie as one process's do.
    """
    executor = config.executor
    memories = range(executor.num_kv_memories)
    return {
        "ranks": executor.tensor_parallel_size,
        "kv_memories": executor.num_kv_memories,
        "expert_parallel": executor.expert_parallel,
        "places": [place for places in places_of_stages(config) for _ in memories for place in places],
    }


def _files_of(config: EngineConfig) -> list[Path]:
    path = Path(config.model.path)
    files = part_paths(path) if is_gguf(path) else sorted(path.iterdir())
    return [each for each in files if each.suffix in SUFFIXES]


def _weights_of(config: EngineConfig) -> object:
    if config.executor.load_format == "dummy":
        return config.executor.seed
    weights = _files_of(config)
    num_samples = max(LEAST_SAMPLES, MOST_SAMPLES // max(1, len(weights)))
    return [[each.stat().st_mtime_ns, *_told_of(each, num_samples)] for each in weights]


def _told_of(path: Path, num_samples: int) -> list[object]:
    """Return a file's name, size, and a hash of samples at even distances, its beginning and its end among them."""
    sampled = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (num_samples - 1))
        for begin in range(0, max(1, size), step):
            sampled.update(os.pread(file.fileno(), SAMPLE_BYTES, begin))
    return [path.name, size, sampled.hexdigest()]


def _samples_of(config: EngineConfig) -> object:
    """Return the same of every piece of the files, and nothing of their times."""
    if config.executor.load_format == "dummy":
        return config.executor.seed
    return [
        _told_of(each, max(LEAST_SAMPLES, each.stat().st_size // SAMPLED_EVERY)) for each in _files_of(config)
    ]


def sources() -> str:
    """Return a name of the Python that decides what the kernels compute: which rotation, which numbers a format stands for."""
    content = hashlib.sha256()
    for path in sorted(EXECUTOR.rglob("*.py")):
        content.update(path.relative_to(EXECUTOR).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()
