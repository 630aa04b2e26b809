"""Which files hold a model's weights: the checkpoint's, and the one with their packed form. Opens none but the index."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quintet.wire.errors import ConfigError
from quintet.wire.json_files import read_json
from quintet.wire.model_files import is_gguf, part_paths

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt")
"""Endings of files that torch pickled: older families exist in no other form."""
PICKLED_FILE = "pytorch_model.bin"
SQUEEZELLM_FILES = "sq-*.pt"
"""As SqueezeLLM's authors name their models' weights."""
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
MAX_NAME_BYTES = 255
"""What Linux allows."""


def packed_file(folder: Path, model: Path, quantization: str, dtype: str, whose: str = "") -> Path:
    """Return the file in ``folder`` for the model of that folder: one for each quantization and number format.

    whose: of several ranks, which one's.
    """
    told = f"{model.resolve()}\0{quantization}\0{dtype}" + f"\0{whose}" * bool(whose)
    named = hashlib.sha256(told.encode()).hexdigest()[:16]
    return folder / f"{model.name}-{quantization}-{named}.packed"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the weights of a folder: the safetensors that its index lists, or all, else the pickled files likewise.

    A file of GGUF, with those it is split into, stands for its own. Raises `ConfigError` where there are none.
    """
    if is_gguf(folder):
        return part_paths(folder)
    for index, single, pattern in (
        (INDEX_FILE, SINGLE_FILE, "*.safetensors"),
        (PICKLED_INDEX_FILE, PICKLED_FILE, "pytorch_model*.bin"),
        (PICKLED_INDEX_FILE, PICKLED_FILE, SQUEEZELLM_FILES),
    ):
        if (folder / index).exists():
            return _listed(folder, folder / index)
        if (folder / single).exists():
            return [folder / single]
        others = sorted(folder.glob(pattern))
        if others:
            return others
    unread = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = (
        f"; {unread[0]} is of a kind Quintet does not read: convert it with transformers' save_pretrained, which writes"
        " safetensors"
        if unread
        else ""
    )
    found = (
        "".join(f"; {path} is a model of its own: name it" for path in sorted(folder.glob("*.gguf"))[:1])
        or found
    )
    raise ConfigError(
        f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE}){found}. To try the rest without: --load-format dummy or"
        " --executor mock"
    )


def _listed(folder: Path, index: Path) -> list[Path]:
    """Return the files that an index lists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: not an index of weights (it has no `weight_map`); download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_file_name(name):
            raise ConfigError(f"{index}: names {name!r:.80}, which is not a plain file name beside it")
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
