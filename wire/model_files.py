"""What the files of a model are called."""

from __future__ import annotations

import re
from pathlib import Path

from quintet.wire.errors import ConfigError

GGUF = ".gguf"
MAX_PARTS = 1 << 12
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_gguf(model: Path) -> bool:
    """Whether a model is a file of GGUF rather than a folder, by its ending."""
    return model.suffix == GGUF


def part_paths(file: Path) -> list[Path]:
    """Return the files of the model that a file of GGUF is a part of, by their names: the first one first.

    Raises `ConfigError` for a number that cannot be.
    """
    named = _PART.fullmatch(file.name)
    if named is None:
        return [file]
    count = int(named["count"])
    if not 1 <= count <= MAX_PARTS:
        raise ConfigError(f"{file}: is one of {count} files by its name; 1 to {MAX_PARTS} are allowed")
    return [file.with_name(f"{named['stem']}-{part:05}-of-{count:05}{GGUF}") for part in range(1, count + 1)]


def card_path(model: Path) -> Path:
    """Return what errors call a model's card: the folder's ``config.json``, or the file that says what that would."""
    return model if is_gguf(model) else model / "config.json"
