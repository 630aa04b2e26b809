"""Extension point for devices: registry of platforms. Imports no torch before a device is opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

ValueT = TypeVar("ValueT")

PLATFORMS = {
    "cpu": "quintet.executor.backends.platforms.cpu:open_platform",
    "cuda": "quintet.executor.backends.platforms.cuda:open_platform",
}
"""Import path of the function that opens an ``ExecutorConfig.device``. Third parties register entry points of
``quintet.platforms``."""


@dataclass(frozen=True, slots=True)
class Platform:
    """An opened device."""

    name: str
    """Key of the kernel table (`quintet.executor.sampling.ops`)."""
    device: torch.device
    description: str
    """For the startup log."""


def open_platform(config: ExecutorConfig) -> Platform:
    """Open the configured device."""
    path = PLATFORMS.get(config.device) or entry_point_path("quintet.platforms", config.device)
    if path is None:
        raise ConfigError(f"--device is {config.device!r}; allowed are {', '.join(sorted(PLATFORMS))}")
    opener: Callable[[ExecutorConfig], Platform] = import_string(path)
    return opener(config)


def import_string(path: str) -> Callable[..., ValueT]:
    """Import ``package.module:name``."""
    module, _, name = path.partition(":")
    value: Callable[..., ValueT] = getattr(importlib.import_module(module), name)
    return value


def entry_point_path(group: str, name: str) -> str | None:
    """Return the import string that an installed package registered under ``name``, or None."""
    for entry in entry_points(group=group, name=name):
        return entry.value
    return None
