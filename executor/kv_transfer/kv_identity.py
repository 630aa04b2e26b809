"""Identity of KV blocks: a hash of everything that determines keys and values, other than the tokens.

The checkpoint is identified by names, sizes and times of its files, and by samples of their bytes, since reading
all takes as long as loading. A copied checkpoint has another identity. Inode and change time are excluded,
because mounting a volume may change them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, sources_name
from quintet.executor.distributed.parallel.shapes import places_of_stages
from quintet.wire.config import EngineConfig
from quintet.wire.model_files import is_gguf, part_paths

SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"}
"""Files with weights, or with code of a model."""

SAMPLE_BYTES = 4096
MOST_SAMPLES, LEAST_SAMPLES = 256, 4
"""Number of samples over all files, and minimum per file: about 10 ms on a current disk."""

EXECUTOR = Path(__file__).parents[1]
SAMPLED_EVERY = 1 << 20
"""Sampling distance in bytes for the portable identity, which excludes times."""


def identity_of(config: EngineConfig, runner: str) -> bytes:
    """Return a 32-byte identity that differs if the same tokens may have other keys and values, or another block layout.

    runner: name of the model runner. Includes settings without a known effect, such as the maximum context length.
    """
    files = _files_of(config)
    num_samples = max(LEAST_SAMPLES, MOST_SAMPLES // max(1, len(files)))
    weights = [(each.stat().st_mtime_ns, *_fingerprint(each, num_samples)) for each in files]
    return hashlib.sha256(_json(_content_of(config, runner, weights))).digest()


def parts_of(config: EngineConfig, runner: str) -> dict[str, str]:
    """Return the portable identity as hashes by name, comparable across machines; weights are hashed by content.

    Every tensor of more than `SAMPLED_EVERY` bytes is sampled.
    """
    files = _files_of(config)
    weights = [_fingerprint(each, max(LEAST_SAMPLES, each.stat().st_size // SAMPLED_EVERY)) for each in files]
    content = _content_of(config, runner, weights)
    return {name: hashlib.sha256(_json(part)).hexdigest()[:32] for name, part in content.items()}


def whole_of(parts: Mapping[str, str]) -> bytes:
    """Return a 32-byte hash of all parts."""
    return hashlib.sha256(_json(parts)).digest()


def digest_of(identity: bytes, key: bytes, block: memoryview) -> bytes:
    """Return the hash of a block with its identity and key."""
    digest = hashlib.sha256(identity + len(key).to_bytes(1, "little") + key)
    digest.update(block)
    return digest.digest()


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _content_of(config: EngineConfig, runner: str, weights: Sequence[object]) -> dict[str, object]:
    """Return everything that determines keys and values. weights: identifies each file of the checkpoint."""
    model = config.model
    library = open_library()
    return {
        "hf_config": hashlib.sha256(model.hf_config.encode()).hexdigest(),
        "architecture": model.architecture,
        "implementation": model.implementation,
        "weights": config.executor.seed if config.executor.load_format == "dummy" else weights,
        "dtype": model.dtype,
        "quantization": config.executor.quantization,
        "activations": config.executor.activation_dtype,
        "sum_leaves": config.executor.sum_leaves,
        **_layout_of(config),
        "kv_dtype": config.cache.dtype,
        "kv": msgspec.to_builtins(
            msgspec.structs.replace(model.kv, draft_bytes=0)
        ),  # of the served model only
        "max_model_len": model.max_model_len,
        "runner": runner,
        "instruction_set": "" if library is None else instruction_set(library),
        "kernels": "" if library is None else sources_name(library),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "executor": sources(),
    }


def _layout_of(config: EngineConfig) -> dict[str, object]:
    """Return the number of ranks and the layout of a block: by stage, then by KV memory.

    With one memory per stage, the layout equals that of a single process.
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
    """Return the files of the checkpoint; none for random weights."""
    if config.executor.load_format == "dummy":
        return []
    path = Path(config.model.path)
    files = part_paths(path) if is_gguf(path) else sorted(path.iterdir())
    return [each for each in files if each.suffix in SUFFIXES]


def _fingerprint(path: Path, num_samples: int) -> tuple[str, int, str]:
    """Return a file's name, size, and a hash of evenly spaced samples, including its beginning and end."""
    sampled = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (num_samples - 1))
        for begin in range(0, max(1, size), step):
            sampled.update(os.pread(file.fileno(), SAMPLE_BYTES, begin))
    return path.name, size, sampled.hexdigest()


def sources() -> str:
    """Return a hash of the executor's Python sources, which determine results, such as the rotation or a quantization format."""
    content = hashlib.sha256()
    for path in sorted(EXECUTOR.rglob("*.py")):
        content.update(path.relative_to(EXECUTOR).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()
