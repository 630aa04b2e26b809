"""Which files hold a model's weights: the checkpoint's, and the one with their packed form. Opens none but the index."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quintet.wire.errors import ConfigError
from quintet.wire.json_files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAME_BYTES = 255
"""What Linux allows."""


def packed_file(folder: Path, model: Path, quantization: str, dtype: str) -> Path:
    """Return the file in ``folder`` for the model of that folder: one for each quantization and number format."""
    named = hashlib.sha256(f"{model.resolve()}\0{quantization}\0{dtype}".encode()).hexdigest()[:16]
    return folder / f"{model.name}-{quantization}-{named}.packed"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder: those its index lists, or all. Raises `ConfigError` where there are none."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: not a safetensors index (it has no `weight_map`); download it again")
        for name in weight_map.values():
            if not isinstance(name, str) or not _is_file_name(name):
                raise ConfigError(f"{index}: names {name!r:.80}, which is not a plain file name beside it")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for path in files:
            if not path.exists():
                raise ConfigError(f"{path}: is missing, though {INDEX_FILE} lists it; download it again")
        return files
    if single.exists():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return others
    unread = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)
    )
    found = (
        f"; {unread[0]} is of a kind Quintet does not read: convert it with transformers' save_pretrained, which writes"
        " safetensors"
        if unread
        else ""
    )
    raise ConfigError(
        f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE}){found}. To try the rest without: --load-format dummy or"
        " --executor mock"
    )


def _is_file_name(name: str) -> bool:
    return (
        Path(name).name == name != ""
        and "\0" not in name
        and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    )
