"""A row of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: how its card is read, and what builds it."""

    read: Callable[[ModelCard], ModelSpec]
    """Raises `ConfigError` of one line that names a senseless value."""
    words: str
    """Which models those are, for people."""
    builder: str = "quintet.executor.models.decoder:Decoder"
    """``module:name`` of what makes the model of the spec and a `quintet.executor.models.model.Setting`."""
