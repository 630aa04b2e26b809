"""Readers of a model folder's JSON files, with one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.wire.errors import ConfigError

Json = dict[str, object]


def read_json(path: Path) -> Json:
    """Read a JSON object. Raises `ConfigError` that names the file."""
    return parse_json(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a file of a model's folder. Raises `ConfigError` that names it."""
    try:
        return path.read_text(encoding="utf-8")
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
