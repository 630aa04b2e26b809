"""Locate the files of a model's weights: checkpoint shards and the packed cache. Opens only the index."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quintet.wire.errors import ConfigError
from quintet.wire.model_files import ADAPTER_CONFIG, is_gguf, part_paths, read_json
from quintet.wire.params import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt")
"""Suffixes of pickled files; some older families have no other form."""
PICKLED_FILE = "pytorch_model.bin"
SQUEEZELLM_FILES = "sq-*.pt"
"""File names of SqueezeLLM's authors."""
MEDUSA_FILE = "medusa_lm_head.pt"
"""File name of Medusa's authors."""
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
_ADAPTER = "adapter_model"
"""Beginning of the file names of an adapter's weights, which may lie beside those of the model."""
MAX_NAME_BYTES = 255
"""Linux limit."""


def packed_file(folder: Path, model: Path, quantization: str, dtype: str, rank_label: str = "") -> Path:
    """Return the packed-cache file in ``folder`` for a model: one for each quantization and number format.

    rank_label: rank of several; empty: a single rank.
    """
    key = f"{model.resolve()}\0{quantization}\0{dtype}" + f"\0{rank_label}" * bool(rank_label)
    named = hashlib.sha256(key.encode()).hexdigest()[:16]
    return folder / f"{model.name}-{quantization}-{named}.packed"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: indexed safetensors, else all of them, else pickled files in the same way.

    A single file takes precedence over an index of missing files, which merging tools copy from the base model.
    A GGUF file returns itself with its split parts. Raises `ConfigError` if there are none.
    """
    if is_gguf(folder):
        return part_paths(folder)
    for index, single, pattern in (
        (INDEX_FILE, SINGLE_FILE, "*.safetensors"),
        (PICKLED_INDEX_FILE, PICKLED_FILE, "pytorch_model*.bin"),
        (PICKLED_INDEX_FILE, PICKLED_FILE, SQUEEZELLM_FILES),
        (PICKLED_INDEX_FILE, PICKLED_FILE, MEDUSA_FILE),
    ):
        has_single = (folder / single).exists()
        if (folder / index).exists() and not (has_single and is_stale(folder / index)):
            return _listed(folder, folder / index)
        if has_single:
            return [folder / single]
        others = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(_ADAPTER)]
        if others:
            return others
    check_no_adapter(folder)
    unread = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    models, found = sorted(folder.glob("*.gguf")), ""
    if models:
        found = f"; {models[0]} is a complete model: pass its path"
    elif unread:
        advice = "convert it with transformers' save_pretrained, which writes safetensors"
        found = f"; {unread[0]} has an unsupported format: {advice}"
    raise ConfigError(
        f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE}){found}. To test without weights: --load-format dummy or"
        " --executor mock"
    )


def check_no_adapter(folder: Path) -> None:
    """Raise `ConfigError` if a folder without weights has an adapter."""
    if (folder / ADAPTER_CONFIG).exists():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise ConfigError(
            f"{folder} is an adapter of {shown(base)}, not a model: serve that model, with the adapter as"
            " --lora-modules NAME=PATH"
        )


def is_stale(index: Path) -> bool:
    """Return whether an index lists a missing file. False for an invalid index."""
    weight_map = read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return any(
        isinstance(name, str) and _is_file_name(name) and not (index.parent / name).exists() for name in names
    )


def _listed(folder: Path, index: Path) -> list[Path]:
    """Return the files that an index lists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: not an index of weights (it has no `weight_map`); download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_file_name(name):
            raise ConfigError(f"{index}: names {name!r:.80}, which is not a file name in the same folder")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    kinds = {path.suffix for path in files}
    if len(kinds) > 1:
        raise ConfigError(
            f"{index}: names files of several kinds ({', '.join(sorted(kinds))}); download it again"
        )
    for path in files:
        if not path.exists():
            raise ConfigError(f"{path}: is missing, though {index.name} lists it; download it again")
    return files


def _is_file_name(name: str) -> bool:
    return (
        Path(name).name == name != ""
        and "\0" not in name
        and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    )
