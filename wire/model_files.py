"""Files of a model: names, JSON readers with one-line errors, number formats of safetensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quintet.wire.errors import ConfigError

GGUF = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_PARTS = 1 << 12
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of the served model (Hu et al., "LoRA: low-rank adaptation of large language models", 2021)."""

    name: str
    """Model name of its requests."""
    path: str
    """Local folder with `ADAPTER_CONFIG` and `ADAPTER_WEIGHTS`, in the format of PEFT."""
    digest: bytes
    """SHA-256 of both files: identifies the adapter in messages and in the keys of KV blocks."""


def adapter_digest_of(folder: Path) -> bytes:
    """Return `AdapterConfig.digest` of an adapter's files. Raises `ConfigError` if one cannot be read."""
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{folder / name}: {error.strerror or error}") from None
    return digest.digest()


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


def hf_config_path(model: Path) -> Path:
    """Return the path that errors name as the model config: the folder's ``config.json``, or the GGUF file."""
    return model if is_gguf(model) else model / "config.json"


LFS_POINTER = b"version https://git-lfs"
"""Beginning of a file that `git clone` leaves instead of a large one."""
LFS_ADVICE = "it is a pointer of Git LFS: run `git lfs pull` in its folder"

Json = dict[str, object]


def read_json(path: Path) -> Json:
    """Read a JSON object. Raises `ConfigError` that names the file."""
    return parse_json(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a file of a model's folder. Raises `ConfigError` that names it."""
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; a model folder has config.json, weights and tokenizer.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise _invalid(path, error) from None


def parse_json(text: str, path: Path) -> Json:
    """Parse a file's text as a JSON object. Raises `ConfigError` that names the file."""
    try:
        loaded: object = json.loads(text)
    except ValueError as error:
        raise _invalid(path, error) from None
    except RecursionError:
        raise _invalid(path, "it is nested too deeply") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not a JSON object")
    return loaded


def _invalid(path: Path, why: object) -> ConfigError:
    return ConfigError(f"{path} is not valid JSON: {why}; download it again")


ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per number."""
