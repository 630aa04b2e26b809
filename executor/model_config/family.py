"""An entry of the model registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its config reader and its model builder."""

    read: Callable[[HfConfig], ModelSpec]
    """Returns the spec of a config. Raises `ConfigError` that names an invalid value."""
    words: str
    """Model names, for users."""
    builder: str = "quintet.executor.models.decoder:Decoder"
    """``module:name`` of the function that builds the model from a spec and a `quintet.executor.models.model.Setting`."""
