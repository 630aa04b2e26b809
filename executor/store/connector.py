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

CONNECTORS = {
    "file": "quintet.executor.store.folder:open_folder",
    "nixl+s3": "quintet.executor.store.nixl:open_nixl",
}
"""Scheme of ``--kv-store`` to the function that opens it. Third parties: entry points of ``quintet.kv_connectors``. Any other
scheme is fsspec's."""
FSSPEC = "quintet.executor.store.objects:open_objects"


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
    installed = (entry.value for entry in entry_points(group="quintet.kv_connectors", name=scheme))
    return CONNECTORS.get(scheme) or next(installed, FSSPEC)
