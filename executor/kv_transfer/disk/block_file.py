"""The two files of an engine's KV blocks on disk, which outlive the process.

    blocks.kv         | block of place 0 | block of place 1 | …          as in KV memory, layer by layer
    blocks.index      | head | entry of place 0 | entry of place 1 | …

An entry has a block's key, a use counter, and a SHA-256 over the identity
(`quintet.executor.kv_transfer.kv_identity`), the key and the block's bytes. A read verifies this hash, so it returns
the block or nothing after any failure: a killed writer, a power loss, corruption, a truncated file. So no write order
is needed and nothing is flushed.

Files with another identity or version are cleared on opening. One process at a time uses a file; the supervisor
ensures that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from pathlib import Path
from zlib import crc32

from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.process.log import LogLimit
from quintet.process.own_files import OwnFolder
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import KEY_BYTES

log = logging.getLogger(__name__)

MAGIC = b"quintet KV blocks 2\n"
HEAD_BYTES = 4096
ENTRY = struct.Struct("<B34sQ32sI")
"""Length of the key, key, use counter, hash of the block, CRC-32 of all these."""
NOTHING = bytes(ENTRY.size)


class BlockFile:
    """Blocks by key. Used by one thread at a time."""

    def __init__(self, folder: Path, identity: bytes, block_bytes: int, num_places: int) -> None:
        """Open or create the files. Raises `ConfigError` on failure."""
        self.block_bytes = block_bytes
        self.num_places = num_places
        self._identity = identity
        self._newest = 0
        self._entries: dict[bytes, tuple[int, bytes]] = {}
        """Key -> place and hash of its block, least recently used first."""
        self._free: list[int] = []
        """Places without a block."""
        self._failed_writes = LogLimit()
        head = (MAGIC + identity + block_bytes.to_bytes(8, "little")).ljust(HEAD_BYTES, b"\0")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.closing(OwnFolder(folder)) as own:
                self._index = own.open("blocks.index", os.O_RDWR | os.O_CREAT)
                self._blocks = own.open("blocks.kv", os.O_RDWR | os.O_CREAT)
            if os.pread(self._index, HEAD_BYTES, 0) != head:
                if os.fstat(self._index).st_size:
                    log.warning("cleared %s: it is of another model or version", folder)
                os.ftruncate(self._index, 0)
                os.ftruncate(self._blocks, 0)
                os.pwrite(self._index, head, 0)
            os.ftruncate(self._index, min(os.fstat(self._index).st_size, self._entry_at(num_places)))
            if os.fstat(self._blocks).st_size > num_places * block_bytes:
                os.ftruncate(self._blocks, num_places * block_bytes)
        except OSError as error:
            raise ConfigError(f"--kv-disk {folder.parent}: {folder}: {error.strerror}") from None
        self._read_index()

    def kept(self) -> list[bytes]:
        """Return the keys of all blocks, least recently used first. Any thread may call it."""
        return [*self._entries.copy()]

    def write(self, key: bytes, block: memoryview) -> bool:
        """Write a block; return whether it succeeded. A full file loses its least recently used block."""
        digest = digest_of(self._identity, key, block)
        try:
            self._forget(key)
            if not self._free:
                self._forget(next(iter(self._entries)))
            place = self._free[-1]
            if write_whole(self._blocks, block, place * self.block_bytes):
                self._enter(place, key, digest)
                self._free.pop()
                return True
            reason = "short write"
        except OSError as error:
            reason = str(error.strerror)
        if number := self._failed_writes.count():  # a full disk stays full
            log.warning("%d KV blocks could not be written to disk: %s", number, reason)
        return False

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a block; return whether it is there and intact. If not, the content of ``into`` is undefined."""
        if key not in self._entries:
            return False
        place, digest = self._entries[key]
        try:
            is_whole = read_whole(self._blocks, into, place * self.block_bytes)
        except OSError as error:
            log.warning("a KV block could not be read from disk: %s", error.strerror)
            is_whole = False
        if is_whole and digest_of(self._identity, key, into) == digest:
            with contextlib.suppress(OSError):  # only the use counter is lost
                self._enter(place, key, digest)
            return True
        log.warning("a KV block on disk is corrupt and will be recomputed")
        self.drop(key)
        return False

    def drop(self, key: bytes) -> None:
        """Clear a block's entry, if there is one. Its bytes stay until overwritten."""
        try:
            self._forget(key)
        except OSError as error:
            log.warning("a KV block on disk could not be cleared: %s", error.strerror)

    def close(self) -> None:
        """Close the files. A network file system may report here that a write has failed; reads find it by its hash."""
        for file in (self._index, self._blocks):
            with contextlib.suppress(OSError):
                os.close(file)

    def _enter(self, place: int, key: bytes, digest: bytes) -> None:
        """Record a place's block as the most recently used."""
        self._newest += 1
        entry = ENTRY.pack(len(key), key, self._newest, digest, 0)[:-4]
        os.pwrite(self._index, entry + crc32(entry).to_bytes(4, "little"), self._entry_at(place))
        self._entries.pop(key, None)
        self._entries[key] = place, digest

    def _forget(self, key: bytes) -> None:
        if key in self._entries:
            place, _ = self._entries.pop(key)
            self._free.append(place)
            os.pwrite(self._index, NOTHING, self._entry_at(place))

    def _entry_at(self, place: int) -> int:
        return HEAD_BYTES + place * ENTRY.size

    def _read_index(self) -> None:
        """Load the valid entries. There are none if the disk has an error."""
        found: list[tuple[int, int, bytes, bytes]] = []
        entries = bytearray()
        try:
            entries = bytearray(max(0, os.fstat(self._index).st_size - HEAD_BYTES))
            read_whole(self._index, memoryview(entries), HEAD_BYTES)
        except OSError as error:
            log.warning("the index of KV blocks on disk could not be read: %s", error.strerror)
            entries = bytearray()
        seen: set[bytes] = set()
        for place in range(min(self.num_places, len(entries) // ENTRY.size)):
            entry = entries[place * ENTRY.size : (place + 1) * ENTRY.size]
            length, key, number, digest, check = ENTRY.unpack(entry)
            if not 0 < length <= max(KEY_BYTES) or crc32(entry[:-4]) != check or key[:length] in seen:
                continue
            seen.add(key[:length])
            found.append((number, place, key[:length], digest))
        self._entries = {key: (place, digest) for _, place, key, digest in sorted(found)}
        used = {place for _, place, *_ in found}
        self._free = [place for place in range(self.num_places - 1, -1, -1) if place not in used]
        self._newest = max((number for number, *_ in found), default=0)


def write_whole(file: int, block: memoryview, offset: int) -> bool:
    """Write all of a block; return whether it succeeded."""
    while len(block):
        written = os.pwrite(file, block, offset)
        if not written:
            return False
        block, offset = block[written:], offset + written
    return True


def read_whole(file: int, into: memoryview, offset: int) -> bool:
    """Fill ``into`` from the file; return whether the file was long enough."""
    while len(into):
        num_read = os.preadv(file, [into], offset)
        if not num_read:
            return False
        into, offset = into[num_read:], offset + num_read
    return True
