"""A model folder's ``config.json``, each value checked where it is read: by name, kind and range.

Kernels and tables rely on these numbers without looking again, so nothing else reads them. Imports no torch: `deploy` resolves
with the same functions what the executor builds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import parse_json
from quintet.wire.model_files import card_path

Key = str | tuple[str, ...]
"""How a card spells a value: its key, or the keys that one family or another gives it, of which the first that has a value
counts."""

FILE_KEYS = "file_keys"
"""Of a card that is made of another file: what that calls each value."""
_SHOWN = 60
"""Characters of a wrong value that an error repeats."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The values, or those of an object among them. What is null counts as absent."""

    values: Mapping[str, Any]
    path: str
    """The file, for error messages."""
    inside: str = ""
    """Where in the file, likewise: ``rope_parameters.``."""

    def has(self, key: Key) -> bool:
        """Whether there is a value."""
        return self.values.get(self.spelling(key)) is not None

    def spelling(self, key: Key) -> str:
        """Return the key under which the card has the value, or null in its place; the first one where it has neither."""
        if isinstance(key, str):
            return key
        there = [each for each in key if each in self.values]
        return next((each for each in there if self.values[each] is not None), (there or list(key))[0])

    def whole(self, key: Key, least: int, most: int, default: int | None = None) -> int:
        """Return a whole number. Raises `ConfigError`, as all of these do."""
        value = self.values.get(self.spelling(key))
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def real(self, key: Key, least: float, most: float, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.values.get(self.spelling(key))
        value = default if value is None else value
        if not _is_number(value) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def reals(self, key: Key, count: int, least: float, most: float) -> tuple[float, ...]:
        """Return a list of so many finite numbers."""
        key = self.spelling(key)
        value = self.values.get(key)
        if not isinstance(value, list) or not all(
            _is_number(each) and least <= each <= most for each in value
        ):
            raise self.wrong(key, f"a list of {count} numbers from {least:g} to {most:g}")
        if len(value) != count:
            raise ConfigError(
                f"{self.path}: {self.inside}{key} has {len(value)} numbers; it must have {count}, one for each pair of"
                " rotated dimensions"
            )
        return tuple(map(float, value))

    def flag(self, key: Key, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(self.spelling(key))
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: Key, known: Sequence[str], default: str) -> str:
        """Return one of the known words."""
        value = self.values.get(self.spelling(key))
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return value

    def section(self, key: str) -> ModelCard:
        """Return an object among the values; an empty one where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ModelCard(value or {}, self.path, f"{self.inside}{key}.")

    def wrong(self, key: Key, allowed: str) -> ConfigError:
        """Return the error for a value that is not what is allowed, for the caller to raise."""
        key = self.spelling(key)
        value = self.values.get(key)
        named = self.values.get(FILE_KEYS)
        key = str(named.get(key, key)) if isinstance(named, dict) else key
        shown = repr(value)
        found = (
            "is missing" if value is None else f"is {shown[:_SHOWN] + '…' if len(shown) > _SHOWN else shown}"
        )
        return ConfigError(f"{self.path}: {self.inside}{key} {found}; it must be {allowed}")


def card_of(config: ModelConfig) -> ModelCard:
    """Return the card of a resolved model: what its ``config.json`` said when `deploy` read it."""
    path = card_path(Path(config.path))
    return ModelCard(parse_json(config.card, path), str(path))


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))
