"""Prefix files: another server with the same weights imports the blocks, and rejects every other file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.executor.kv_transfer.test_block_file import (
    BLOCK_BYTES,
    IDENTITY,
    KEYS,
    block_of,
    flip,
    found,
    opened,
    written,
)

from quintet.executor.kv_transfer.disk.block_file import BlockFile
from quintet.executor.kv_transfer.disk.prefix_file import (
    PrefixFileError,
    read_keys,
    read_prefix,
    write_prefix,
)
from quintet.executor.kv_transfer.store.chunk_format import ENTRY, HEAD

NAME = "prefix.kv"
WANTED = KEYS[:3]


def exported(folder: Path) -> Path:
    *_, num_bytes = write_prefix(folder / "out", NAME, IDENTITY, written(folder), WANTED)
    assert (folder / "out" / NAME).stat().st_size == num_bytes
    return folder / "out"


def imported(folder: Path, file: BlockFile) -> list[tuple[bytes, bool]]:
    assert list(read_keys(folder, NAME, IDENTITY, file)) == WANTED
    return list(read_prefix(folder, NAME, IDENTITY, file, WANTED))


def test_an_exported_prefix_is_imported(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    assert os.listdir(folder) == [NAME]
    other = opened(tmp_path / "other")
    assert imported(folder, other) == [(key, True) for key in WANTED]
    again = opened(tmp_path / "other")
    assert [found(again, key) for key in WANTED] == [block_of(key) for key in WANTED]


def test_a_damaged_block_is_not_imported(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    flip(folder / NAME, HEAD.size + 3 * ENTRY.size + 32 + BLOCK_BYTES + 5)
    other = opened(tmp_path / "other")
    assert [is_stored for _, is_stored in imported(folder, other)] == [True, False, True]
    assert found(other, KEYS[1]) is None


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "it was truncated or extended"),
    "another's": (lambda path: flip(path, 25), "is of another model, other weights"),
    "another version": (lambda path: flip(path, 18), "was not written by this version's `kv export`"),
    "empty": (lambda path: os.truncate(path, 0), "was not written by"),
    "a key": (lambda path: flip(path, HEAD.size + 5), "the hash of its table does not match"),
    "gone": (lambda path: path.unlink(), "No such file"),
    "a folder": (folder, "is a folder, not a file"),
    "a pipe": (pipe, "is neither a folder nor a file"),
    "a link": (link, "is a symbolic link, which is not followed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_damaged_or_foreign_file_is_rejected(tmp_path: Path, what: str) -> None:
    folder = exported(tmp_path)
    damage, words = REFUSED[what]
    damage(folder / NAME)
    other = opened(tmp_path / "other")
    with pytest.raises(PrefixFileError, match=words):
        imported(folder, other)
    assert not other.kept()


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    file = written(tmp_path)
    steps = write_prefix(tmp_path / "out", NAME, IDENTITY, file, WANTED)
    next(steps)
    file.drop(WANTED[1])
    with pytest.raises(PrefixFileError, match="were evicted during the export"):
        list(steps)
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(PrefixFileError, match="were evicted"):
        list(write_prefix(tmp_path / "out", NAME, IDENTITY, file, WANTED))
    list(write_prefix(tmp_path / "out", NAME, IDENTITY, file, WANTED[:1]))
    with pytest.raises(PrefixFileError, match="exists: use another name"):
        list(write_prefix(tmp_path / "out", NAME, IDENTITY, file, WANTED[:1]))
