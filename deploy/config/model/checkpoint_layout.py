"""Facts of a checkpoint that ``config.json`` lacks or states wrongly: layout of experts, merged weights, tied embeddings.

transformers 5 keeps experts stacked. Its checkpoints have either layout: Qwen 3.5 MoE is published stacked, and copies of it
have a tensor for each expert.

Weights can be merged with an adapter that was trained on a model quantized by bitsandbytes (QLoRA). Merging tools write 16-bit
weights, but leave the training's ``quantization_config``.

Fine-tunes often keep the base model's ``config.json`` with tied embeddings. transformers uses the separate output layer
(``lm_head``), and so does Quintet. A checkpoint without an output layer is tied, as in vLLM: multimodal configs may state ties
only for the text model, and fine-tunes may omit them.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.checkpoints.weights.header import Entry, read_header
from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.names import Names, spellings
from quintet.executor.model_config.spec import DecoderSpec, ModelSpec
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import Json, is_gguf

_UNTIED_NOTE = "config.json ties word embeddings, but the checkpoint contains a different output layer (lm_head), which is used"
_TIED_NOTE = "config.json does not tie word embeddings, but the checkpoint has no output layer (lm_head): they are tied"
_CHUNK_BYTES = 1 << 20
_TIES = ("tie_word_embeddings", "tie_embedding")
"""Config keys of tied embeddings."""

MERGED_NOTE = "config.json declares bitsandbytes, but the checkpoint has no quantized weights: they are read as they are"


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors in a header. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            return read_header(path, file, path.stat().st_size).entries
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def is_merged(folder: Path, stored: Format | None) -> bool:
    """Return whether a config declares bitsandbytes, but no tensor of the safetensors files is quantized."""
    if stored is None or stored.name != "bitsandbytes" or is_gguf(folder):
        return False
    return not any(
        path.suffix in PICKLED or any(stored.mark in name for name in read_entries(path))
        for path in checkpoint_files(folder)
    )


def has_stacked_experts(folder: Path, spec: ModelSpec) -> bool:
    """Return whether a checkpoint has stacked experts, although the spec has a tensor for each expert.

    Reads headers up to the first layer with experts. False for GGUF files and pickled files. Raises `ConfigError`.
    """
    if not isinstance(spec, DecoderSpec) or is_gguf(folder):
        return False
    layer = next((index for index, each in enumerate(spec.layers) if _is_separate(each.mlp)), None)
    if layer is None:
        return False
    names = spec.names
    stacked = spellings(names.in_layer(layer, names.experts_gate_up), names.prefix)
    first = names.in_layer(layer, names.expert_gate.format(expert=0))
    separate = tuple(f"{each}." for each in spellings(first, names.prefix))
    for path in checkpoint_files(folder):
        entries = {} if path.suffix in PICKLED else read_entries(path)
        if any(name in entries for name in stacked):
            return True
        if any(name.startswith(separate) for name in entries):
            return False
    return False


def _is_separate(mlp: object) -> bool:
    return isinstance(mlp, ExpertsSpec) and mlp.layout is ExpertsLayout.SEPARATE


def with_value(config: Json, key: str, value: object) -> Json:
    """Return a config with another value of a key, for the language model too if it is a part."""
    text = config.get("text_config")
    part = {"text_config": {**text, key: value}} if isinstance(text, dict) else {}
    return {**config, key: value, **part}


def correct_ties(folder: Path, config: Json, spec: ModelSpec) -> tuple[Json, str] | None:
    """Return a config with the checkpoint's ties, and a note; None if they already agree. Raises `ConfigError`.

    None for GGUF files (config derived from tensors) and for pickled files (no header).
    """
    if not isinstance(spec, DecoderSpec) or is_gguf(folder):
        return None
    if not spec.tied:
        has_head = _has_head(folder, spec.names)
        return None if has_head else (_with_ties(config, is_tied=True), _TIED_NOTE)
    if _has_own_head(folder, spec.names):
        return _with_ties(config, is_tied=False), _UNTIED_NOTE
    return None


def _has_own_head(folder: Path, names: Names) -> bool:
    """Return whether a checkpoint has an output layer that differs from the embedding.

    Reads the headers of safetensors files, and both tensors up to the first difference.
    """
    heads = {f"{each}.weight" for each in spellings(names.head, names.prefix)}
    embeddings = {f"{each}.weight" for each in spellings(names.embedding, names.prefix)}
    head: tuple[Path, Entry] | None = None
    embedding: tuple[Path, Entry] | None = None
    for path in checkpoint_files(folder):
        if path.suffix in PICKLED:
            return False
        for name, entry in read_entries(path).items():
            head = (path, entry) if name in heads else head
            embedding = (path, entry) if name in embeddings else embedding
    if head is None or embedding is None or head[1].shape != embedding[1].shape:
        return False
    return head[1].dtype != embedding[1].dtype or _differ(*head, *embedding)


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
    changed = {**config, **{key: is_tied for key in _TIES if key in config or key == _TIES[0]}}
    text = config.get("text_config")
    return (
        changed
        if not isinstance(text, dict)
        else {**changed, "text_config": _with_ties(text, is_tied=is_tied)}
    )


def _differ(path: Path, entry: Entry, other_path: Path, other: Entry) -> bool:
    """Compare two tensors of the same size."""
    with path.open("rb") as first, other_path.open("rb") as second:
        a = mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ)
        b = mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ)
        with a, b:
            for begin in range(0, entry.num_bytes, _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, entry.num_bytes)
                if a[entry.begin + begin : entry.begin + end] != b[other.begin + begin : other.begin + end]:
                    return True
    return False
