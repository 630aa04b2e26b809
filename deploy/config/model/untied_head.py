"""Detection of untied output layers in checkpoints with tied word embeddings in ``config.json``.

Fine-tunes often keep the base model's ``config.json``. transformers uses the separate output layer, and so does
Quintet. Reads the headers of safetensors files, and both tensors up to the first difference.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.checkpoints.weights.header import Entry, read_header
from quintet.executor.model_config.names import Names
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import Json, is_gguf

_CHUNK_BYTES = 1 << 20
_TIES = ("tie_word_embeddings", "tie_embedding")
"""Config keys of tied embeddings."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a file."""

    path: Path
    entry: Entry


def has_own_head(folder: Path, names: Names) -> bool:
    """Return whether a checkpoint has an output layer that differs from the embedding. Raises `ConfigError`.

    False for GGUF files (config derived from tensors) and for pickled files (no header).
    """
    if is_gguf(folder):
        return False
    heads = _spellings(names.head, names.prefix)
    embeddings = _spellings(names.embedding, names.prefix)
    head = embedding = None
    for path in checkpoint_files(folder):
        if path.suffix in PICKLED:
            return False
        for name, entry in _entries(path).items():
            head = _StoredTensor(path, entry) if name in heads else head
            embedding = _StoredTensor(path, entry) if name in embeddings else embedding
    if head is None or embedding is None or head.entry.shape != embedding.entry.shape:
        return False
    return head.entry.dtype != embedding.entry.dtype or _differ(head, embedding)


def untied(config: Json) -> Json:
    """Return a config with untied embeddings."""
    changed = {**config, **{key: False for key in _TIES if key in config or key == _TIES[0]}}
    text = config.get("text_config")
    return changed if not isinstance(text, dict) else {**changed, "text_config": untied(text)}


def _spellings(name: str, prefix: str) -> set[str]:
    return {f"{each}.weight" for each in (name, prefix + name, name.removeprefix(prefix))}


def _entries(path: Path) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            return read_header(path, file, path.stat().st_size).entries
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _differ(one: _StoredTensor, other: _StoredTensor) -> bool:
    with one.path.open("rb") as first, other.path.open("rb") as second:
        a = mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ)
        b = mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ)
        with a, b:
            return any(
                a[
                    one.entry.begin + offset : one.entry.begin
                    + min(offset + _CHUNK_BYTES, one.entry.num_bytes)
                ]
                != b[
                    other.entry.begin + offset : other.entry.begin
                    + min(offset + _CHUNK_BYTES, other.entry.num_bytes)
                ]
                for offset in range(0, one.entry.num_bytes, _CHUNK_BYTES)
            )
