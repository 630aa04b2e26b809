"""Files of KV blocks: what was written is read again, by whoever opens them next, and nothing else ever is."""

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
WHOSE = b"w" * 32
KEYS = [bytes([number]) * (32 if number % 2 else 34) for number in range(1, 5)]


def block_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK_BYTES)


_OPENED: list[BlockFile] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def opened(folder: Path, *, whose: bytes = WHOSE, num_places: int = 4) -> BlockFile:
    file = BlockFile(folder / "engine-0", whose, BLOCK_BYTES, num_places)
    _OPENED.append(file)
    return file


def written(folder: Path) -> BlockFile:
    """Return a file with every key in a place of its own, the last one written first."""
    file = opened(folder)
    for place, key in reversed([*enumerate(KEYS)]):
        assert file.write(place, key, memoryview(block_of(key)))
    return file


def found(file: BlockFile, place: int, key: bytes) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    return bytes(into) if file.read(place, key, memoryview(into)) else None


def test_what_was_written_is_read_by_whoever_opens_it_next(tmp_path: Path) -> None:
    written(tmp_path)  # and never closed: its writer was killed
    file = opened(tmp_path)
    assert file.kept() == [*reversed([*enumerate(KEYS)])], "in the order of writing"
    assert [found(file, place, key) for place, key in enumerate(KEYS)] == [block_of(key) for key in KEYS]
    assert found(file, 0, KEYS[1]) is None


def test_a_place_holds_what_was_written_last(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert file.write(0, b"n" * 32, memoryview(block_of(b"n")))
    file = opened(tmp_path)
    assert file.kept()[-1] == (0, b"n" * 32)
    assert found(file, 0, b"n" * 32) == block_of(b"n") and found(file, 0, KEYS[0]) is None


@pytest.mark.parametrize("change", [{"whose": b"o" * 32}, {"num_places": 2}])
def test_files_of_another_model_begin_anew_and_of_another_size_are_cut(
    tmp_path: Path, change: dict[str, object]
) -> None:
    written(tmp_path)
    file = opened(tmp_path, **change)  # type: ignore[arg-type]
    places = [place for place, _ in file.kept()]
    assert places == ([] if "whose" in change else [1, 0])
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
def test_what_is_not_whole_is_a_miss(tmp_path: Path, damage: str) -> None:
    written(tmp_path)
    folder = tmp_path / "engine-0"
    DAMAGES[damage](folder / "blocks.kv", folder / "blocks.index")
    file = opened(tmp_path)
    assert found(file, 1, KEYS[1]) is None
    assert all(found(file, place, key) in (None, block_of(key)) for place, key in enumerate(KEYS))
    assert file.write(1, KEYS[1], memoryview(block_of(KEYS[1])))
    assert found(opened(tmp_path), 1, KEYS[1]) == block_of(KEYS[1])


def test_a_writer_killed_between_block_and_entry_leaves_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    blocks = tmp_path / "engine-0" / "blocks.kv"
    content = bytearray(blocks.read_bytes())
    content[:600] = bytes(600)
    blocks.write_bytes(content)
    assert found(opened(tmp_path), 0, KEYS[0]) is None


def test_random_bytes_are_no_files(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(20):
        written(tmp_path)
        for path in (tmp_path / "engine-0").iterdir():
            content = bytearray(path.read_bytes())
            begin = rng.randrange(len(content))
            content[begin : begin + rng.randrange(2000)] = rng.randbytes(rng.randrange(2000))
            path.write_bytes(content)
        file = opened(tmp_path)
        for place, key in enumerate(KEYS):
            assert found(file, place, key) in (None, block_of(key))


def test_a_disk_that_is_full_holds_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quintet.executor.kv_transfer.disk.block_file.write_whole", full)
        assert not file.write(0, KEYS[0], memoryview(block_of(KEYS[0])))
    assert found(file, 0, KEYS[0]) is None and found(opened(tmp_path), 0, KEYS[0]) is None


def test_what_is_read_is_used_last(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert found(file, 3, KEYS[3]) and not found(file, 2, KEYS[3])
    assert [place for place, _ in file.kept()] == [2, 1, 0, 3]
    assert opened(tmp_path).kept() == file.kept()


def test_links_and_what_belongs_to_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else would choose what is written over, or read as ours."""
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


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine-0").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk .*File exists"):
        opened(tmp_path)
