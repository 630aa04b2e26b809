"""Typed access to a GGUF file's metadata, by keys of its architecture. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quintet.executor.checkpoints.gguf.header import Strings, Tensor
from quintet.executor.checkpoints.gguf.parts import GgufParts
from quintet.wire.errors import ConfigError

_MAX_FACTORS = 1 << 12


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata below the architecture's name, and the tensors: source of a config."""

    parts: GgufParts
    architecture: str
    tensors: Mapping[str, Tensor]
    in_layers: frozenset[str]
    """Tensor names within layers, without the layer's prefix."""

    @classmethod
    def of(cls, parts: GgufParts) -> GgufMetadata:
        """Read a file's metadata. Raises `ConfigError` if it names no architecture."""
        name = parts.metadata.get("general.architecture")
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ConfigError(
                f"{parts.path}: general.architecture is {name!r:.60}; it must be the name of an architecture"
            )
        tensors = dict(parts.tensors())
        in_layers = frozenset(
            each.split(".", 2)[2] for each in tensors if each.startswith("blk.") and each.count(".") > 1
        )
        return cls(parts, name, tensors, in_layers)

    @property
    def path(self) -> Path:
        """Path of the first file, for error messages."""
        return self.parts.path

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as JSON type, ``default`` if it is missing. The config's reader validates it."""
        value = self.parts.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, Strings):
            raise self.wrong(key, "a number, a truth value or a text")
        return default if value is None else value.tolist() if isinstance(value, np.ndarray) else value

    def copied(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Return config values by the GGUF keys of each; None for a missing one."""
        return {ours: self.get(theirs) for ours, theirs in keys.items()}

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer; the single value of a list of equal ones."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise self.wrong(key, "a whole number, the same for all layers")
        return value

    def once(self, key: str) -> int | None:
        """Return an integer that is the same for all layers; None if it is missing."""
        return None if self.get(key) is None else self.whole(key)

    def largest(self, key: str, default: int) -> int:
        """Return an integer; the largest of a list."""
        value = self.get(key, default)
        values = value if isinstance(value, list) and value else [value]
        if not all(type(each) is int and 0 <= each < 1 << 32 for each in values):
            raise self.wrong(key, "a whole number, or a list of such")
        largest: int = max(values)
        return largest

    def real(self, key: str, default: float | None = None) -> float:
        """Return a float."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        return float(value)

    def each(self, key: str, count: int) -> list[int]:
        """Return an integer for each of ``count`` layers; a single value is repeated."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(type(each) is int and each >= 0 for each in values):
            raise self.wrong(key, f"a whole number, or a list of {count}")
        return values

    def wrong(self, key: str, allowed: str) -> ConfigError:
        """Return the error for an invalid value."""
        value = self.parts.metadata.get(f"{self.architecture}.{key}")
        found = "is missing" if value is None else f"is {value!r:.60}"
        return ConfigError(f"{self.path}: {self.architecture}.{key} {found}; it must be {allowed}")

    def has(self, *names: str) -> bool:
        """Return True if the file, or one of its layers, has one of these tensors."""
        return any(name in self.tensors or name in self.in_layers for name in names)

    def rows(self, name: str) -> int:
        """Return the outermost dimension of a tensor. Raises `ConfigError` if it is missing."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: tensor {name!r} is missing; the download may be incomplete")
        return self.tensors[name].shape[0]

    def factors(self, name: str) -> list[float]:
        """Read a small float32 tensor."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise ConfigError(
                f"{self.path}: tensor {name!r} is {tensor.type.name} {list(tensor.shape)}; it must be F32 [n]"
            )
        header = next(each for each in self.parts.headers if name in each.tensors)
        numbers = np.fromfile(header.path, "<f4", tensor.shape[0], offset=tensor.begin)
        return [float(each) for each in numbers]
