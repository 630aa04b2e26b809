"""Tied embeddings: ``config.json`` compared with the output layer (``lm_head``) of the checkpoint."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.checkpoints.weights.header import Entry, read_header
from quintet.executor.model_config.names import Names, spellings
from quintet.executor.model_config.spec import DecoderSpec, ModelSpec
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import Json, is_gguf

_UNTIED_NOTE = "config.json ties word embeddings, but the checkpoint contains a different output layer (lm_head), which is used"
_TIED_NOTE = "config.json does not tie word embeddings, but the checkpoint has no output layer (lm_head): they are tied"
_CHUNK_BYTES = 1 << 20
_TIES = ("tie_word_embeddings", "tie_embedding")
"""Config keys of tied embeddings."""


@dataclass(frozen=True, slots=True)
class CorrectedTies:
    """A config with the ties of the checkpoint."""

    config: Json
    note: str


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a file."""

    path: Path
    entry: Entry


def correct_ties(folder: Path, config: Json, spec: ModelSpec) -> CorrectedTies | None:
    """Return a config with the checkpoint's ties; None if they already agree. Raises `ConfigError`.

    Fine-tunes often keep the base model's ``config.json`` with tied embeddings. transformers uses the separate output layer,
    and so does Quintet. A checkpoint without an output layer is tied, as in vLLM: multimodal configs may state ties only for
    the text model, and fine-tunes may omit them.

    None for GGUF files (config derived from tensors) and for pickled files (no header).
    """
    if not isinstance(spec, DecoderSpec) or is_gguf(folder):
        return None
    if not spec.tied:
        has_head = _has_head(folder, spec.names)
        return None if has_head else CorrectedTies(_with_ties(config, is_tied=True), _TIED_NOTE)
    if _has_own_head(folder, spec.names):
        return CorrectedTies(_with_ties(config, is_tied=False), _UNTIED_NOTE)
    return None


def _has_own_head(folder: Path, names: Names) -> bool:
    """Return whether a checkpoint has an output layer that differs from the embedding.

    Reads the headers of safetensors files, and both tensors up to the first difference.
    """
    heads = {f"{each}.weight" for each in spellings(names.head, names.prefix)}
    embeddings = {f"{each}.weight" for each in spellings(names.embedding, names.prefix)}
    head = embedding = None
    for path in checkpoint_files(folder):
        if path.suffix in PICKLED:
            return False
        for name, entry in read_entries(path).items():
            head = _StoredTensor(path, entry) if name in heads else head
            embedding = _StoredTensor(path, entry) if name in embeddings else embedding
    if head is None or embedding is None or head.entry.shape != embedding.entry.shape:
        return False
    return head.entry.dtype != embedding.entry.dtype or _differ(head, embedding)


def _has_head(folder: Path, names: Names) -> bool:
    """Return whether a checkpoint has an output layer, quantized or not; true for pickled files.

    Starts with the last file, which usually has it.
    """
    heads = tuple(f"{each}." for each in spellings(names.head, names.prefix))
    return any(
        path.suffix in PICKLED or any(name.startswith(heads) for name in read_entries(path))
        for path in reversed(checkpoint_files(folder))
    )


def _with_ties(config: Json, *, is_tied: bool) -> Json:
    """Return a config with tied or untied embeddings."""
    changed = {**config, **{key: is_tied for key in _TIES if key in config or key == _TIES[0]}}
    text = config.get("text_config")
    return (
        changed
        if not isinstance(text, dict)
        else {**changed, "text_config": _with_ties(text, is_tied=is_tied)}
    )


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors in a header. Raises `ConfigError`."""
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
