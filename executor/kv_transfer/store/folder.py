"""A store in a folder that several processes of one user share: in shared memory (``/dev/shm``), or on a disk.

    quintet-kv/ledger                         bytes stored or reserved; locked during a change
    quintet-kv/<identity>/<key>               a complete object; its mtime is its last use
    quintet-kv/<identity>/.<key>.<number>     an object being written, locked by its writer

A writer renames a complete object while it holds the ledger. The kernel releases the lock of a killed process, so its
unfinished file is recognized and removed. Space is reserved before writing, so the limit holds after any crash.
Reservations of dead processes are corrected by the scan of a full folder, which also evicts the least recently used
objects, down to 90% of the limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from quintet.executor.kv_transfer.disk.block_file import read_whole, write_whole
from quintet.executor.kv_transfer.store.connector import ObjectStore
from quintet.process.own_files import OwnFolder
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

FILL_AFTER_EVICTION = 0.9
"""Fill level after an eviction: a scan of the folder takes longer than writing an object."""
LOCK_S = 2.0
"""Timeout for the ledger's lock, which is normally held for milliseconds."""
SUBFOLDER = "quintet-kv"


def open_folder(config: KvStoreConfig) -> FolderStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    path = Path(config.url.removeprefix("file://").removeprefix("file:"))
    try:
        return FolderStore(path / SUBFOLDER, config.size_bytes)
    except OSError as error:
        raise ConfigError(f"--kv-store {config.url}: {error.filename}: {error.strerror}") from None


class FolderStore(ObjectStore):
    """Objects as files. Its methods raise `OSError`."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Raises `OSError` if the folder belongs to another user, or is not writable."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._size_bytes = size_bytes
        self._folder = OwnFolder(folder)
        self._path = folder
        os.close(self._folder.open("ledger", os.O_RDWR | os.O_CREAT))  # fails if it is not writable
        self._numbers = itertools.count()

    # --- the connector ---

    def count(self, names: Sequence[str]) -> int:
        existing = itertools.takewhile(lambda name: self._folder.size_of(name) is not None, names)
        return sum(1 for _ in existing)

    def put(self, name: str, content: memoryview) -> bool:
        if self._folder.size_of(name) == len(content):
            self._use(name)
            return True
        folder, _, short = name.partition("/")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700, dir_fd=self._folder.descriptor)
        unfinished = f"{folder}/.{short}.{os.getpid()}-{next(self._numbers)}"
        file = self._reserve(unfinished, len(content))
        if file is None:
            return False
        is_whole = False
        try:
            is_whole = write_whole(file, content, 0)
        finally:
            try:
                self._settle(unfinished, name if is_whole else None, len(content))
            finally:
                os.close(file)  # releases its lock: a later scan removes it if not renamed
        return is_whole

    def get(self, name: str, into: memoryview) -> bool:
        try:
            file = self._folder.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            is_there = os.fstat(file).st_size == len(into) and read_whole(file, into, 0)
        finally:
            os.close(file)
        if is_there:
            self._use(name)
        return is_there

    def drop(self, name: str) -> None:
        self._folder.remove(name)

    def close(self) -> None:
        self._folder.close()

    def _use(self, name: str) -> None:
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(name, dir_fd=self._folder.descriptor, follow_symlinks=False)

    # --- space ---

    def _reserve(self, unfinished: str, size: int) -> int | None:
        """Reserve space and return a new file, open and locked; None if there is no space."""
        if size > self._size_bytes:
            return None
        with self._locked_ledger() as ledger:
            kept = int.from_bytes(os.pread(ledger, 8, 0), "little")
            if kept + size > self._size_bytes:
                kept = self._evict(size)
            if kept + size > self._size_bytes:  # all other space is being written
                os.pwrite(ledger, kept.to_bytes(8, "little"), 0)
                return None
            os.pwrite(ledger, (kept + size).to_bytes(8, "little"), 0)
            file = self._folder.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, size)  # so that scans count it
            return file

    def _settle(self, unfinished: str, name: str | None, size: int) -> None:
        """Rename a complete file, unless an equal object exists; otherwise remove it and release its space."""
        with self._locked_ledger() as ledger:
            if name is not None and self._folder.size_of(name) != size:
                self._folder.rename(unfinished, name)
                return
            self._folder.remove(unfinished)
            kept = int.from_bytes(os.pread(ledger, 8, 0), "little")
            os.pwrite(ledger, max(0, kept - size).to_bytes(8, "little"), 0)

    @contextlib.contextmanager
    def _locked_ledger(self) -> Iterator[int]:
        """Open and lock the ledger, also against threads of this process. Raises `TimeoutError`."""
        ledger = self._folder.open("ledger", os.O_RDWR | os.O_CREAT)
        try:
            until_s = time.monotonic() + LOCK_S
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > until_s:
                    raise TimeoutError("the ledger is held by another writer")
                time.sleep(0.002)
            yield ledger
        finally:
            os.close(ledger)  # releases the lock

    def _evict(self, size: int) -> int:
        """Scan the folder, remove files of dead writers and evict LRU objects. Return the bytes that are left."""
        found: list[tuple[int, int, str]] = []
        kept = 0
        for folder in os.scandir(self._folder.descriptor):
            for entry in os.scandir(self._path / folder.name) if folder.is_dir(follow_symlinks=False) else ():
                name = f"{folder.name}/{entry.name}"
                if entry.name.startswith("."):
                    kept += self._live_writer_bytes(name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, name))
                    kept += status.st_size
        most = max(0, int(self._size_bytes * FILL_AFTER_EVICTION) - size)
        for _, object_size, name in sorted(found):
            if kept <= most:
                break
            self._folder.remove(name)
            kept -= object_size
        return kept

    def _live_writer_bytes(self, unfinished: str) -> int:
        """Return the size of a file with a live writer; otherwise remove the file and return 0."""
        try:
            file = self._folder.open(unfinished, os.O_RDWR)  # NFS cannot lock a file opened read-only
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fstat(file).st_size
        else:
            self._folder.remove(unfinished)
            return 0
        finally:
            os.close(file)
