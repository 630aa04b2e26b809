"""Which files hold a model's weights: the checkpoint's, and the one with their packed form. Opens none but the index."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quintet.wire.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def packed_file(folder: Path, model: Path, quantization: str, dtype: str) -> Path:
    """Return the file in ``folder`` for the model of that folder: one for each quantization and number format."""
    named = hashlib.sha256(f"{model.resolve()}\0{quantization}\0{dtype}".encode()).hexdigest()[:16]
    return folder / f"{model.name}-{quantization}-{named}.packed"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder: those its index lists, or all. Raises `ConfigError` where there are none."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not a safetensors index ({error}); download it again") from error
        files = [folder / name for name in names]
        for name, path in zip(names, files, strict=True):
            if Path(name).name != name:
                raise ConfigError(f"{index}: names {name!r}, which is not a plain file name beside it")
            if not path.exists():
                raise ConfigError(f"{path}: is missing, though {INDEX_FILE} lists it; download it again")
        return files
    if single.exists():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return others
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder}: has only pickled weights, which can run code and are not read; convert them with"
            " transformers' save_pretrained, which writes safetensors"
        )
    raise ConfigError(
        f"{folder}: has no weights ({SINGLE_FILE} or {INDEX_FILE}); use --load-format dummy to do without"
    )
