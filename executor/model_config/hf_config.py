"""Read values of a model folder's ``config.json``, checked by name, type and range.

Kernels and tables rely on these values without further checks, so all reads pass through `HfConfig`. Imports no
torch: `deploy` resolves the configuration with the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import hf_config_path, parse_json

Key = str | tuple[str, ...]
"""A value's key in a config, or alternative keys of different families; the first key with a value counts."""

FILE_KEYS = "file_keys"
"""For a config converted from another file: a map from config keys to that file's keys, for error messages."""
_SHOWN = 60
"""Maximum length of a wrong value in an error message."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The values of a config, or of a nested object. A null value counts as absent."""

    values: Mapping[str, Any]
    path: str
    """The file's path, for error messages."""
    inside: str = ""
    """Prefix of a nested object's keys, for error messages: ``rope_parameters.``."""

    def has(self, key: Key) -> bool:
        """True if the value is present."""
        return self.values.get(self.spelling(key)) is not None

    def spelling(self, key: Key) -> str:
        """Return the key under which the config has the value, else a key with null, else the first key."""
        if isinstance(key, str):
            return key
        present = [each for each in key if each in self.values]
        return next((each for each in present if self.values[each] is not None), (present or list(key))[0])

    def _value(self, key: Key, default: object) -> Any:
        value = self.values.get(self.spelling(key))
        return default if value is None else value

    def whole(self, key: Key, least: int, most: int, default: int | None = None) -> int:
        """Return an integer in range. Raises `ConfigError`, as all readers do."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def real(self, key: Key, least: float, most: float, default: float | None = None) -> float:
        """Return a finite number in range."""
        value = self._value(key, default)
        if not _is_number(value) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def reals(self, key: Key, count: int, least: float, most: float, each_of: str) -> tuple[float, ...]:
        """Return a list of ``count`` finite numbers in range. each_of: what has one number each, for errors."""
        key = self.spelling(key)
        value = self.values.get(key)
        if not isinstance(value, list) or not all(
            _is_number(each) and least <= each <= most for each in value
        ):
            raise self.wrong(key, f"a list of {count} numbers from {least:g} to {most:g}")
        if len(value) != count:
            raise ConfigError(
                f"{self.path}: {self.inside}{key} has {len(value)} numbers; it must have {count}, one for each {each_of}"
            )
        return tuple(map(float, value))

    def flag(self, key: Key, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: Key, known: Sequence[str], default: str) -> str:
        """Return one of the ``known`` strings."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return value

    def section(self, key: str) -> HfConfig:
        """Return a nested object; an empty one if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return HfConfig(value or {}, self.path, f"{self.inside}{key}.")

    def wrong(self, key: Key, allowed: str) -> ConfigError:
        """Return the error for a value that is not allowed; the caller raises it."""
        key = self.spelling(key)
        value = self.values.get(key)
        named = self.values.get(FILE_KEYS)
        key = str(named.get(key, key)) if isinstance(named, dict) else key
        shown = repr(value)
        found = (
            "is missing" if value is None else f"is {shown[:_SHOWN] + '…' if len(shown) > _SHOWN else shown}"
        )
        return ConfigError(f"{self.path}: {self.inside}{key} {found}; it must be {allowed}")


def hf_config_of(config: ModelConfig) -> HfConfig:
    """Return the config of a resolved model, from the ``config.json`` that `deploy` read."""
    path = hf_config_path(Path(config.path))
    return HfConfig(parse_json(config.hf_config, path), str(path))


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))
