"""The two files that hold an engine's blocks, and survive whoever writes them.

    blocks.kv         | block of place 0 | block of place 1 | …          as they lie in KV memory, layer by layer
    blocks.index      | head | entry of place 0 | entry of place 1 | …

An entry has a block's key, when it was written or last read, and the SHA-256 of *whose* the files are
(`quintet.executor.kv_transfer.kv_identity`), of the key and of the block's bytes. Nothing is believed that does not
have this hash. So whatever became of the bytes (a writer was killed, the power went, the disk rotted, somebody cut
the file), a read returns the block or nothing, and no order of writing has to be kept: nothing is flushed.

Files of another model, layout or version are emptied when they are opened. A file is one process's at a time; who owns the folder
is the supervisor's to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from pathlib import Path
from zlib import crc32

from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.process.own_files import open_own
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

MAGIC = b"quintet KV blocks 2\n"
HEAD_BYTES = 4096
ENTRY = struct.Struct("<B34sQ32sI")
"""Length of the key, key, a number that grows with every write and read, hash of the block, CRC-32 of all these."""
NOTHING = bytes(ENTRY.size)
MAX_KEY_BYTES = 34
SILENCE_S = 60.0
"""Between two lines of the log that say that blocks could not be written."""


class BlockFile:
    """Blocks by place and key. For one thread at a time."""

    def __init__(self, folder: Path, whose: bytes, block_bytes: int, num_places: int) -> None:
        """Open the files, or make them. Raises `ConfigError` where that cannot be done."""
        self.block_bytes = block_bytes
        self.num_places = num_places
        self._whose = whose
        self._newest = 0
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        """Place -> key and hash of what it holds."""
        self._num_unwritten = 0
        """Since that was last said."""
        self._silent_until = 0.0
        head = (MAGIC + whose + block_bytes.to_bytes(8, "little")).ljust(HEAD_BYTES, b"\0")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index, self._blocks = _open(folder, "blocks.index", "blocks.kv")
            if os.pread(self._index, HEAD_BYTES, 0) != head:
                if os.fstat(self._index).st_size:
                    log.warning("%s is of another model or version: it begins anew, empty", folder)
                os.ftruncate(self._index, 0)
                os.ftruncate(self._blocks, 0)
                os.pwrite(self._index, head, 0)
            os.ftruncate(self._index, min(os.fstat(self._index).st_size, self._entry_at(num_places)))
            if os.fstat(self._blocks).st_size > num_places * block_bytes:
                os.ftruncate(self._blocks, num_places * block_bytes)
        except OSError as error:
            raise ConfigError(f"--kv-disk {folder.parent}: {folder}: {error.strerror}") from None
        self._kept = self._read_index()

    def kept(self) -> list[tuple[int, bytes]]:
        """Return place and key of everything there is, what was written or read longest ago first."""
        return [(place, self._digests[place][0]) for place in self._kept if place in self._digests]

    def holds(self, place: int, key: bytes) -> bool:
        """Return whether a place holds this block, as far as is known."""
        return self._digests.get(place, (b"",))[0] == key

    def write(self, place: int, key: bytes, block: memoryview) -> bool:
        """Have a place hold a block; return whether it does. Where it does not it holds nothing."""
        digest = digest_of(self._whose, key, block)
        try:
            self._forget(place)
            if write_whole(self._blocks, block, place * self.block_bytes):
                self._enter(place, key, digest)
                return True
            why = "no more of it could be written"
        except OSError as error:
            why = str(error.strerror)
        self._complain(why)
        return False

    def _complain(self, why: str) -> None:
        """Say that a block could not be written; not of each, since a disk that is full stays full."""
        self._num_unwritten += 1
        if time.monotonic() >= self._silent_until:
            log.warning("%d blocks of KV could not be written to disk: %s", self._num_unwritten, why)
            self._num_unwritten = 0
            self._silent_until = time.monotonic() + SILENCE_S

    def read(self, place: int, key: bytes, into: memoryview) -> bool:
        """Read the block of a place, if it holds this one, whole; return whether. Otherwise anything may be in ``into``."""
        known, digest = self._digests.get(place, (b"", b""))
        if known != key:
            return False
        try:
            is_whole = read_whole(self._blocks, into, place * self.block_bytes)
        except OSError as error:
            log.warning("a block of KV could not be read from disk: %s", error.strerror)
            is_whole = False
        if is_whole and digest_of(self._whose, key, into) == digest:
            with contextlib.suppress(OSError):  # then a later start does not know of this use
                self._enter(place, key, digest)
            return True
        log.warning("a block of KV on disk is not what was written: it is computed again")
        with contextlib.suppress(OSError):
            self._forget(place)
        return False

    def drop(self, place: int, key: bytes) -> None:
        """Have a place hold nothing, if it holds this block. Its bytes stay until others are written over them."""
        if self.holds(place, key):
            try:
                self._forget(place)
            except OSError as error:
                log.warning("a block of KV on disk could not be forgotten: %s", error.strerror)

    def close(self) -> None:
        """Close the files."""
        os.close(self._index)
        os.close(self._blocks)

    def _enter(self, place: int, key: bytes, digest: bytes) -> None:
        """Note what a place holds, as what was used last."""
        self._newest += 1
        entry = ENTRY.pack(len(key), key, self._newest, digest, 0)[:-4]
        os.pwrite(self._index, entry + crc32(entry).to_bytes(4, "little"), self._entry_at(place))
        self._digests[place] = key, digest
        self._kept.pop(place, None)
        self._kept[place] = None

    def _forget(self, place: int) -> None:
        if self._digests.pop(place, None) is not None:
            del self._kept[place]
            os.pwrite(self._index, NOTHING, self._entry_at(place))

    def _entry_at(self, place: int) -> int:
        return HEAD_BYTES + place * ENTRY.size

    def _read_index(self) -> dict[int, None]:
        """Note what the entries say that are whole; return their places, what was used longest ago first."""
        found: list[tuple[int, int]] = []
        entries = _read_from(self._index, HEAD_BYTES)
        seen: set[bytes] = set()
        for place in range(min(self.num_places, len(entries) // ENTRY.size)):
            entry = entries[place * ENTRY.size : (place + 1) * ENTRY.size]
            length, key, number, digest, check = ENTRY.unpack(entry)
            if not 0 < length <= MAX_KEY_BYTES or crc32(entry[:-4]) != check or key[:length] in seen:
                continue
            seen.add(key[:length])
            self._digests[place] = key[:length], digest
            found.append((number, place))
        self._newest = max((number for number, _ in found), default=0)
        return {place: None for _, place in sorted(found)}


def _open(folder: Path, *names: str) -> list[int]:
    """Open files of a folder, all of them ours: otherwise somebody else chose what we read, or what we write over."""
    inside = open_own(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        return [open_own(name, os.O_RDWR | os.O_CREAT, inside) for name in names]
    finally:
        os.close(inside)


def write_whole(file: int, block: memoryview, offset: int) -> bool:
    """Write all of a block; return whether that was possible."""
    while len(block):
        written = os.pwrite(file, block, offset)
        if not written:
            return False
        block, offset = block[written:], offset + written
    return True


def read_whole(file: int, into: memoryview, offset: int) -> bool:
    """Fill ``into``; return whether the file had so much."""
    while len(into):
        num_read = os.preadv(file, [into], offset)
        if not num_read:
            return False
        into, offset = into[num_read:], offset + num_read
    return True


def _read_from(file: int, offset: int) -> bytes:
    found = bytearray()
    while part := os.pread(file, 1 << 20, offset + len(found)):
        found += part
    return bytes(found)
