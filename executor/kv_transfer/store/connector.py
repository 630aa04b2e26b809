"""Interface of a KV store's connector: named objects of bytes. A connector does not interpret their content.

Several threads call a connector at once. Its methods may block for any time and raise any exception: an error is a
miss, and slow stores are bypassed. A failed write must not leave an incomplete object that looks complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Protocol

from quintet.wire.config import KvStoreConfig

PLUG_INS = "quintet.kv_connectors"
"""Entry point group for stores, named by URL scheme; only the configured one is imported.

`pyproject.toml` lists our own stores; other packages can add theirs.
"""
FOLDER = "quintet.executor.kv_transfer.store.folder:open_folder"
FSSPEC = "quintet.executor.kv_transfer.store.objects:open_objects"
MAX_DAMAGED = 4096
"""Maximum number of remembered damaged objects that could not be removed; forgotten ones are detected again."""


class ObjectStore(Protocol):
    """A store of objects. Ours are subclasses."""

    def count(self, names: Sequence[str]) -> int:
        """Return the number of leading objects that exist; objects after the first missing one need no lookup."""

    def put(self, name: str, content: memoryview) -> bool:
        """Store an object unless one of this name and size exists; return whether it exists now."""

    def get(self, name: str, into: memoryview) -> bool:
        """Read an object of exactly this size into ``into``. If it is missing, return False; ``into`` is undefined then."""

    def drop(self, name: str) -> None:
        """Remove a damaged object."""

    def close(self) -> None:
        """Close connections and files, if any are left open."""
        return  # by default none is


def open_connector(config: KvStoreConfig) -> ObjectStore:
    """Return the connector of a store. Raises `ConfigError` for an invalid configuration, not for an unreachable store."""
    opener: Callable[[KvStoreConfig], ObjectStore] = resolve_name(connector_path(config.url))
    return opener(config)


def connector_path(url: str) -> str:
    """Return the import string of a store's opener."""
    scheme = url.partition(":")[0]
    if scheme == "file":
        return FOLDER
    return next((entry.value for entry in entry_points(group=PLUG_INS, name=scheme)), FSSPEC)


def known_schemes() -> list[str]:
    """Return the schemes of all stores except fsspec's."""
    return ["file", *sorted({entry.name for entry in entry_points(group=PLUG_INS)})]
