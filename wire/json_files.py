"""Reading the JSON files of a model's folder: what is wrong with one is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.wire.errors import ConfigError

Json = dict[str, object]


def read_json(path: Path) -> Json:
    """Read a JSON object. Raises `ConfigError` that names the file."""
    try:
        loaded: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; a model folder has config.json, weights and tokenizer.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; download it again") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid JSON: it is nested too deeply; download it again") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not a JSON object")
    return loaded
