"""The seam to whoever keeps runs of blocks: objects of bytes, by their names. What they hold, and whether it is whole, it
does not know.

A connector's methods are called from several threads at once, may take as long as they take, and raise what they like: an error
is a miss, and whoever waits too long computes. None of them may leave half an object that looks like a whole one for good.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Protocol

from quintet.wire.config import KvStoreConfig

PLUG_INS = "quintet.kv_connectors"
"""Entry points of this group open a store each, by the scheme that they are named for: our own, which `pyproject.toml` lists, and
those of other packages. Who is not asked for is not imported."""
FOLDER = "quintet.executor.kv_transfer.store.folder:open_folder"
FSSPEC = "quintet.executor.kv_transfer.store.objects:open_objects"
MAX_DAMAGED = 4096
"""Of objects that were found damaged and could not be removed, so many are remembered; what is forgotten is found again."""


class KvConnector(Protocol):
    """A store of objects."""

    def count(self, names: Sequence[str]) -> int:
        """Return how many of the first of these objects are there; who follows one that lacks need not be looked for."""

    def put(self, name: str, content: memoryview) -> bool:
        """Keep an object, unless one of this name and size is there; return whether it is there now."""

    def get(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object of just this size; return False, with anything in ``into``, where there is none."""

    def drop(self, name: str) -> None:
        """Forget an object, which was found damaged."""

    def close(self) -> None:
        """Let go of connections and files."""


def open_connector(config: KvStoreConfig) -> KvConnector:
    """Return who keeps a store. Raises `ConfigError` where that cannot be told here; that nobody answers is no error."""
    module, _, name = connector_path(config.url).partition(":")
    opener: Callable[[KvStoreConfig], KvConnector] = getattr(importlib.import_module(module), name)
    return opener(config)


def connector_path(url: str) -> str:
    """Return the import string of what opens this store."""
    scheme = url.partition(":")[0]
    if scheme == "file":
        return FOLDER
    return next((entry.value for entry in entry_points(group=PLUG_INS, name=scheme)), FSSPEC)


def known_schemes() -> list[str]:
    """Return the schemes of all stores but fsspec's."""
    return ["file", *sorted({entry.name for entry in entry_points(group=PLUG_INS)})]
