"""A store in object storage, or whatever else fsspec reaches: ``s3://bucket/prefix``, ``gs://…``, ``abfs://…``.

fsspec, and the package of the storage (s3fs, gcsfs, adlfs), are the user's to install; credentials are theirs to find, in the
environment or in their own files. How much is kept, and how long, is the owner's to say, by the storage's lifecycle rules.

Object storage is far: a question takes tens of milliseconds. So what is there of a chain is searched like a word in a dictionary,
several questions at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

QUESTIONS = 8
"""Asked at once, of one search."""


class FileSystem(Protocol):
    """What is used of ``fsspec.AbstractFileSystem``."""

    def info(self, path: str) -> dict[str, object]:
        """Return what is known of a file, its ``size`` among it; raise `FileNotFoundError`."""

    def cat_file(self, path: str) -> bytes:
        """Return a file's content."""

    def pipe_file(self, path: str, value: bytes) -> None:
        """Write a file."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""

    def mkdir(self, path: str, create_parents: bool) -> None:
        """Make a folder, where there are folders."""


def open_objects(config: KvStoreConfig) -> ObjectStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    scheme = config.url.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(config.url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"--kv-store {config.url}: {error}. {scheme}: is reached by fsspec (pip install 'quintet[store]') with the package of"
            " that storage, such as s3fs, gcsfs or adlfs"
        ) from None
    except Exception as error:  # noqa: BLE001 -- of packages that have their own; their words may hold secrets
        raise ConfigError(
            f"--kv-store {config.url}: the package for {scheme} cannot begin ({type(error).__name__}): does it find in the"
            " environment, or in its own files, what it needs (account, credentials)?"
        ) from None
    return ObjectStore(files, path)


class ObjectStore:
    """See `quintet.executor.kv_transfer.store.connector.KvConnector`. Errors are fsspec's."""

    def __init__(self, files: FileSystem, path: str) -> None:
        """path: below which all objects are."""
        self._files = files
        self._path = path.rstrip("/")

    def count(self, names: Sequence[str]) -> int:
        """See `KvConnector.count`. What lies behind an object that is there is taken to be preceded by others that are."""
        return count_first(len(names), lambda indexes: self._are_there([names[each] for each in indexes]))

    def _are_there(self, names: Sequence[str]) -> list[bool]:
        """Ask about all at once, from threads that the end of the process does not wait for."""
        found: list[bool | Exception] = [False] * len(names)

        def ask(index: int) -> None:
            try:
                found[index] = self._size_of(names[index]) is not None
            except Exception as error:  # noqa: BLE001 -- whoever asked for it raises it
                found[index] = error

        threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [each for each in found if isinstance(each, Exception)]
        if errors:
            raise errors[0]
        return [each is True for each in found]

    def _size_of(self, name: str) -> object | None:
        try:
            return self._files.info(f"{self._path}/{name}")["size"]
        except FileNotFoundError:
            return None

    def put(self, name: str, content: memoryview) -> bool:
        """See `KvConnector.put`."""
        if self._size_of(name) == len(content):
            return True
        path = f"{self._path}/{name}"
        try:
            self._files.pipe_file(path, bytes(content))
        except FileNotFoundError:
            self._make_folders_of(name)
            self._files.pipe_file(path, bytes(content))
        return True

    def _make_folders_of(self, name: str) -> None:
        """Make what is missing between the place of all objects and one of them; where that place is missing, it is mistyped."""
        folders = name.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            with contextlib.suppress(FileExistsError):  # made before, or by another thread
                self._files.mkdir("/".join([self._path, *folders[:depth]]), create_parents=False)

    def get(self, name: str, into: memoryview) -> bool:
        """See `KvConnector.get`."""
        try:
            content = self._files.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return False
        if len(content) != len(into):
            return False
        into[:] = content
        return True

    def drop(self, name: str) -> None:
        """See `KvConnector.drop`."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")

    def close(self) -> None:
        """See `KvConnector.close`: connections end with the process."""


def count_first(number: int, are_there: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return how many of the first of so many things are there, where each that is is preceded by others that are.

    Asks about `QUESTIONS` of them at once, at even distances, then between the last that is there and the first that is not.
    """
    there, lacking = 0, number + 1
    """So many of the first are there; so many are not."""
    while lacking - there > 1:
        step = max(1, (lacking - there) // (QUESTIONS + 1))
        counts = [*range(there + step, lacking, step)][:QUESTIONS]
        for count, is_there in zip(counts, are_there([count - 1 for count in counts]), strict=True):
            if not is_there:
                lacking = count
                break
            there = count
    return there
