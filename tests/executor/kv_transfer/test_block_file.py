"""Files of KV blocks: reopening finds the written blocks and rejects everything else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quintet.executor.kv_transfer.disk.block_file import ENTRY, HEAD_BYTES, BlockFile
from quintet.process import own_files
from quintet.wire.errors import ConfigError

BLOCK_BYTES = 1000
IDENTITY = b"w" * 32
KEYS = [bytes([number]) * (32 if number % 2 else 34) for number in range(1, 5)]


def block_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK_BYTES)


_OPENED: list[BlockFile] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def opened(folder: Path, *, identity: bytes = IDENTITY, num_places: int = 4) -> BlockFile:
    file = BlockFile(folder / "engine-0", identity, BLOCK_BYTES, num_places)
    _OPENED.append(file)
    return file


def written(folder: Path) -> BlockFile:
    """Return a full file."""
    file = opened(folder)
    for key in KEYS:
        assert file.write(key, memoryview(block_of(key)))
    return file


def found(file: BlockFile, key: bytes) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    return bytes(into) if file.read(key, memoryview(into)) else None


def test_blocks_are_read_after_reopening(tmp_path: Path) -> None:
    written(tmp_path)  # never closed: the writer was killed
    file = opened(tmp_path)
    assert file.kept() == KEYS, "blocks must be in the order of writing"
    assert [found(file, key) for key in KEYS] == [block_of(key) for key in KEYS]
    assert found(file, b"n" * 32) is None


def test_a_dropped_block_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.drop(KEYS[2])
    assert file.kept() == [KEYS[0], KEYS[1], KEYS[3]] and found(file, KEYS[2]) is None
    assert file.write(b"n" * 32, memoryview(block_of(b"n")))
    file = opened(tmp_path)
    assert file.kept() == [KEYS[0], KEYS[1], KEYS[3], b"n" * 32]
    assert found(file, b"n" * 32) == block_of(b"n")
    assert (tmp_path / "engine-0" / "blocks.kv").stat().st_size == 4 * BLOCK_BYTES


def test_a_full_file_loses_the_least_recently_used_block(tmp_path: Path) -> None:
    """It may hold blocks that were written for earlier tables, which the core does not know."""
    file = written(tmp_path)
    assert found(file, KEYS[0])
    assert file.write(b"n" * 32, memoryview(block_of(b"n")))
    assert opened(tmp_path).kept() == file.kept() == [KEYS[2], KEYS[3], KEYS[0], b"n" * 32]
    assert file.write(KEYS[3], memoryview(block_of(KEYS[3])))
    assert file.kept() == [KEYS[2], KEYS[0], b"n" * 32, KEYS[3]]


@pytest.mark.parametrize("change", [{"identity": b"o" * 32}, {"num_places": 2}])
def test_files_of_another_model_are_cleared_and_of_another_size_resized(
    tmp_path: Path, change: dict[str, object]
) -> None:
    written(tmp_path)
    file = opened(tmp_path, **change)  # type: ignore[arg-type]
    assert file.kept() == ([] if "identity" in change else KEYS[:2])
    assert (tmp_path / "engine-0" / "blocks.kv").stat().st_size <= 2 * BLOCK_BYTES


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "a bit of the block": lambda blocks, _: flip(blocks, BLOCK_BYTES + 500),
    "a bit of its entry": lambda _, index: flip(index, HEAD_BYTES + ENTRY.size + 60),
    "a bit of its key": lambda _, index: flip(index, HEAD_BYTES + ENTRY.size + 1),
    "blocks are cut": lambda blocks, _: os.truncate(blocks, BLOCK_BYTES + 999),
    "the index is cut": lambda _, index: os.truncate(index, HEAD_BYTES + 2 * ENTRY.size - 1),
    "blocks are gone": lambda blocks, _: blocks.unlink(),
    "the index is gone": lambda _, index: index.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_a_miss(tmp_path: Path, damage: str) -> None:
    written(tmp_path)
    folder = tmp_path / "engine-0"
    DAMAGES[damage](folder / "blocks.kv", folder / "blocks.index")
    file = opened(tmp_path)
    assert found(file, KEYS[1]) is None
    assert all(found(file, key) in (None, block_of(key)) for key in KEYS)
    assert file.write(KEYS[1], memoryview(block_of(KEYS[1])))
    assert found(opened(tmp_path), KEYS[1]) == block_of(KEYS[1])


def test_a_writer_killed_between_block_and_entry_leaves_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    blocks = tmp_path / "engine-0" / "blocks.kv"
    content = bytearray(blocks.read_bytes())
    content[:600] = bytes(600)
    blocks.write_bytes(content)
    assert found(opened(tmp_path), KEYS[0]) is None


def test_random_bytes_are_not_a_block_file(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(20):
        written(tmp_path)
        for path in (tmp_path / "engine-0").iterdir():
            content = bytearray(path.read_bytes())
            begin = rng.randrange(len(content))
            content[begin : begin + rng.randrange(2000)] = rng.randbytes(rng.randrange(2000))
            path.write_bytes(content)
        file = opened(tmp_path)
        for key in KEYS:
            assert found(file, key) in (None, block_of(key))


def test_an_unreadable_index_is_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted executor serves without the blocks."""
    written(tmp_path)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        file = opened(tmp_path)
    assert not file.kept() and found(file, KEYS[0]) is None
    assert "index of KV blocks on disk could not be read: Input/output error" in caplog.text
    assert file.write(KEYS[0], memoryview(block_of(KEYS[0]))) and found(file, KEYS[0])


def test_errors_of_closing_are_no_errors_of_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, close, closed = written(tmp_path), os.close, list[int]()

    def fails(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        raise OSError(28, "No space left on device")

    _OPENED.remove(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        file.close()
    assert len(closed) == 2


def test_a_full_disk_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quintet.executor.kv_transfer.disk.block_file.write_whole", full)
        assert not file.write(KEYS[0], memoryview(block_of(KEYS[0])))
    assert found(file, KEYS[0]) is None and found(opened(tmp_path), KEYS[0]) is None


def test_reading_makes_a_block_most_recently_used(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert found(file, KEYS[1])
    assert file.kept() == [KEYS[0], KEYS[2], KEYS[3], KEYS[1]]
    assert opened(tmp_path).kept() == file.kept()


def test_symbolic_links_and_files_of_other_users_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could choose the file that is overwritten, or provide the contents."""
    written(tmp_path)
    folder, secret = tmp_path / "engine-0", tmp_path / "secret"
    secret.write_bytes(b"not to be cut")
    (folder / "blocks.kv").unlink()
    (folder / "blocks.kv").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"--kv-disk .*: is a symbolic link"):
        opened(tmp_path)
    assert secret.read_bytes() == b"not to be cut"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"--kv-disk .*: is a symbolic link"):
        opened(tmp_path)
    folder.unlink()
    monkeypatch.setattr(own_files, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(
        ConfigError, match=r"--kv-disk .* belongs to user \d+, but the server runs as user \d+"
    ):
        opened(tmp_path)


def test_a_file_instead_of_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "engine-0").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk .*File exists"):
        opened(tmp_path)
