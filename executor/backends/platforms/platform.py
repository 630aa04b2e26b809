"""The device side's seam: which device, how many threads, which kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

import torch

from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError

ValueT = TypeVar("ValueT")

PLATFORMS = {
    "cpu": "quintet.executor.backends.platforms.cpu:open_platform",
    "cuda": "quintet.executor.backends.platforms.cuda:open_platform",
}
"""``ExecutorConfig.device`` to the function that opens it. Third parties: entry points of ``quintet.platforms``."""


@dataclass(frozen=True, slots=True)
class Platform:
    """An opened device."""

    name: str
    """Key of the table of kernels (`quintet.executor.sampling.ops`)."""
    device: torch.device
    description: str
    """For the boot story."""


def open_platform(config: ExecutorConfig) -> Platform:
    """Open the device that the configuration names."""
    path = PLATFORMS.get(config.device) or entry_point_path("quintet.platforms", config.device)
    if path is None:
        raise ConfigError(f"--device is {config.device!r}; it must be one of {', '.join(sorted(PLATFORMS))}")
    opener: Callable[[ExecutorConfig], Platform] = import_string(path)
    return opener(config)


def import_string(path: str) -> Callable[..., ValueT]:
    """Return what ``package.module:name`` names."""
    module, _, name = path.partition(":")
    value: Callable[..., ValueT] = getattr(importlib.import_module(module), name)
    return value


def entry_point_path(group: str, name: str) -> str | None:
    """Return the import string that an installed package registered under ``name``, or None."""
    for entry in entry_points(group=group, name=name):
        return entry.value
    return None
