"""A store in object storage, or in any other fsspec file system: ``s3://bucket/prefix``, ``gs://…``, ``abfs://…``.

Users install fsspec and the storage's package (s3fs, gcsfs, adlfs), which finds credentials in the environment or in
its own files. The storage's lifecycle rules limit size and age.

A lookup in object storage takes tens of milliseconds. So the length of an existing chain is found by a search with
several lookups in parallel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from quintet.executor.kv_transfer.store.connector import ObjectStore
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

NUM_PARALLEL_LOOKUPS = 8
"""Parallel lookups of one search."""


def open_objects(config: KvStoreConfig) -> FsspecStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    scheme = config.url.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(config.url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"--kv-store {config.url}: {error}. {scheme}: needs fsspec (pip install 'quintet[store]') and the package of"
            " that storage, such as s3fs, gcsfs or adlfs"
        ) from None
    except Exception as error:  # noqa: BLE001 -- storage packages raise their own errors, with possible secrets in the text
        raise ConfigError(
            f"--kv-store {config.url}: the package for {scheme} failed to start ({type(error).__name__}): check the account and"
            " credentials in the environment or in its files"
        ) from None
    return FsspecStore(files, path)


class FsspecStore(ObjectStore):
    """Objects as files of fsspec. Its methods raise fsspec's errors."""

    def __init__(self, files: Any, path: str) -> None:
        """files: an ``fsspec.AbstractFileSystem``, which has no types. path: prefix of all objects."""
        self._files = files
        self._path = path.rstrip("/")

    def count(self, names: Sequence[str]) -> int:
        """Return the number of leading objects that exist, if all objects before an existing one exist."""
        return count_first(len(names), lambda indexes: self._exist([names[each] for each in indexes]))

    def _exist(self, names: Sequence[str]) -> list[bool]:
        """Look up all names in parallel, in daemon threads that do not delay the exit of the process."""
        found = [Future[bool]() for _ in names]

        def ask(index: int) -> None:
            try:
                found[index].set_result(self._size_of(names[index]) is not None)
            except Exception as error:  # noqa: BLE001 -- raised by `result`
                found[index].set_exception(error)

        for index in range(len(names)):
            threading.Thread(target=ask, args=(index,), daemon=True).start()
        return [each.result() for each in found]

    def _size_of(self, name: str) -> Any:
        try:
            return self._files.info(f"{self._path}/{name}")["size"]
        except FileNotFoundError:
            return None

    def put(self, name: str, content: memoryview) -> bool:
        if self._size_of(name) == len(content):
            return True
        path = f"{self._path}/{name}"
        try:
            self._files.pipe_file(path, bytes(content))
        except FileNotFoundError:  # of the first object of an identity; the store's own path must exist
            with contextlib.suppress(FileExistsError):  # made by another thread
                self._files.mkdir(path.rpartition("/")[0], create_parents=False)
            self._files.pipe_file(path, bytes(content))
        return True

    def get(self, name: str, into: memoryview) -> bool:
        try:
            content = self._files.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return False
        if len(content) != len(into):
            return False
        into[:] = content
        return True

    def drop(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


def count_first(number: int, exist: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return the number of leading items that exist, if all items before an existing one exist.

    Looks up `NUM_PARALLEL_LOOKUPS` evenly spaced items at once, then continues between the last existing and the first missing
    one.
    """
    existing, missing = 0, number + 1
    """Numbers of leading items: known to exist, and known not to exist."""
    while missing - existing > 1:
        step = max(1, (missing - existing) // (NUM_PARALLEL_LOOKUPS + 1))
        counts = [*range(existing + step, missing, step)][:NUM_PARALLEL_LOOKUPS]
        for count, is_there in zip(counts, exist([count - 1 for count in counts]), strict=True):
            if not is_there:
                missing = count
                break
            existing = count
    return existing
