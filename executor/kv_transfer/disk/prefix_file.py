"""Export format of a prefix: one file with KV blocks, to import on another server that computes the same bits.

    head | table: an entry for each block | SHA-256 of all before | block | block | …

Head and entries are those of `quintet.executor.kv_transfer.store.chunk_format`. An unfinished file has a temporary
name. Hashes detect accidents, not attacks: an importer must trust the file's author.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quintet.executor.kv_transfer.disk.block_file import BlockFile, read_whole, write_whole
from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.executor.kv_transfer.store.chunk_format import ENTRY, HEAD, entry_of
from quintet.process.own_files import OwnFolder
from quintet.wire.kv_tiers import KEY_BYTES

MAGIC = b"quintet KV prefix 1\n"
HASH_BYTES = 32


class PrefixFileError(Exception):
    """The file cannot be written or read; the message gives the cause."""


def write_prefix(
    folder: Path, name: str, identity: bytes, file: BlockFile, keys: Sequence[bytes]
) -> Iterator[int]:
    """Write the blocks of these keys one at a time; yield the total bytes written after each.

    Raises `PrefixFileError` if the file exists, a block was evicted, or the disk has an error.
    """
    unfinished = f".{name}.part"
    with _disk_errors(folder / name):
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.closing(OwnFolder(folder)) as held:
            if held.size_of(name) is not None:
                raise PrefixFileError(f"{folder / name} exists: use another name, or remove the file")
            target = held.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                table = bytearray(HEAD.pack(MAGIC, identity, file.block_bytes, len(keys)))
                end, block = _first_block(len(keys)), memoryview(bytearray(file.block_bytes))
                for key in keys:
                    if not file.read(key, block):
                        raise PrefixFileError("some blocks were evicted during the export: export it again")
                    if not write_whole(target, block, end):
                        raise PrefixFileError("short write: is the disk full?")
                    table += entry_of(identity, key, block)
                    end += file.block_bytes
                    yield end
                os.pwrite(target, table + hashlib.sha256(table).digest(), 0)
                os.fsync(target)
                held.rename(unfinished, name)
            finally:
                os.close(target)
                held.remove(unfinished)  # no effect after the rename


def read_keys(folder: Path, name: str, identity: bytes, file: BlockFile) -> list[bytes]:
    """Return the keys of a file's blocks. Raises `PrefixFileError` for a damaged file, or one of another identity."""
    with _opened(folder / name) as source:
        return list(_entries(folder / name, source, identity, file))


def read_prefix(
    folder: Path, name: str, identity: bytes, file: BlockFile, keys: Sequence[bytes]
) -> Iterator[tuple[bytes, bool]]:
    """Copy blocks of the file to the disk one at a time; yield key and success of each.

    Raises `PrefixFileError` as `read_keys` does.
    """
    with _opened(folder / name) as source:
        entries = _entries(folder / name, source, identity, file)
        block = memoryview(bytearray(file.block_bytes))
        for key in keys:
            offset, digest = entries.get(key, (0, b""))
            is_whole = (
                bool(digest)
                and read_whole(source, block, offset)
                and digest_of(identity, key, block) == digest
            )
            yield key, is_whole and file.write(key, block)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise `PrefixFileError` for a disk error."""
    try:
        yield
    except OSError as error:
        raise PrefixFileError(f"{path}: {error.strerror}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading. Raises `PrefixFileError`."""
    with _disk_errors(path):
        with contextlib.closing(OwnFolder(path.parent)) as held:
            source = held.open(path.name, os.O_RDONLY)
        try:
            yield source
        finally:
            os.close(source)


def _first_block(num_blocks: int) -> int:
    """Return the offset of the first block in bytes."""
    return HEAD.size + num_blocks * ENTRY.size + HASH_BYTES


def _entries(path: Path, source: int, identity: bytes, file: BlockFile) -> dict[bytes, tuple[int, bytes]]:
    """Return offset and hash of each block by key, after checks of identity, size and table."""
    size, head = os.fstat(source).st_size, os.pread(source, HEAD.size, 0)
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise PrefixFileError(f"{path} was not written by this version's `kv export`")
    _, theirs, block_bytes, num_blocks = HEAD.unpack(head)
    if theirs != identity or block_bytes != file.block_bytes:
        raise PrefixFileError(
            f"{path} is of another model, other weights, another format or version, or another kind of processor, so its"
            " bits may differ"
        )
    table_bytes = num_blocks * ENTRY.size
    expected = _first_block(num_blocks) + num_blocks * block_bytes
    if size != expected:
        raise PrefixFileError(f"{path} has {size} bytes instead of {expected}: it was truncated or extended")
    table = os.pread(source, table_bytes + HASH_BYTES, HEAD.size)
    if hashlib.sha256(head + table[:table_bytes]).digest() != table[table_bytes:]:
        raise PrefixFileError(f"{path} is damaged: the hash of its table does not match")
    found: dict[bytes, tuple[int, bytes]] = {}
    for index, (length, key, digest) in enumerate(ENTRY.iter_unpack(table[:table_bytes])):
        if not 0 < length <= max(KEY_BYTES):
            raise PrefixFileError(f"{path} is damaged: a key has {length} bytes")
        found[key[:length]] = _first_block(num_blocks) + index * block_bytes, digest
    if len(found) != num_blocks:
        raise PrefixFileError(f"{path} is damaged: it names a block twice")
    return found
