"""File names of models."""

from __future__ import annotations

import re
from pathlib import Path

from quintet.wire.errors import ConfigError

GGUF = ".gguf"
MAX_PARTS = 1 << 12
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_gguf(model: Path) -> bool:
    """Return True when the path is a GGUF file rather than a folder, by its suffix."""
    return model.suffix == GGUF


def part_paths(file: Path) -> list[Path]:
    """Return all files of a split GGUF model by name, the first one first.

    Raises `ConfigError` for an invalid number of files.
    """
    named = _PART.fullmatch(file.name)
    if named is None:
        return [file]
    count = int(named["count"])
    if not 1 <= count <= MAX_PARTS:
        raise ConfigError(f"{file}: is one of {count} files by its name; 1 to {MAX_PARTS} are allowed")
    return [file.with_name(f"{named['stem']}-{part:05}-of-{count:05}{GGUF}") for part in range(1, count + 1)]


def card_path(model: Path) -> Path:
    """Return the path that errors name as the model config: the folder's ``config.json``, or the GGUF file."""
    return model if is_gguf(model) else model / "config.json"
