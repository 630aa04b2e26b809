"""KV on disk, device side: transfers run in a thread, and results belong to the current tables only."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.wire.test_record import config_of

from quintet.executor.kv_transfer.block_bytes import BlockBytes
from quintet.executor.kv_transfer.connector import without_failed_disk
from quintet.executor.kv_transfer.disk import back_end
from quintet.executor.kv_transfer.disk.back_end import DiskBackEnd
from quintet.executor.kv_transfer.disk.block_file import NOTHING, BlockFile
from quintet.wire.codec import pack_i32
from quintet.wire.config import KvDiskConfig
from quintet.wire.kv_tiers import Fetch, FileRequest, KvTierRequests, KvTierResults, Store

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


class Bench:
    """Two layers of KV memory with a disk, and the loop that waits for its results."""

    def __init__(self, folder: Path, identity: Callable[[], bytes] = lambda: b"o" * 32) -> None:
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer
            for layer in range(2)
        ]
        self.file = BlockFile(folder / "engine-0", b"w" * 32, 2 * LAYER_BYTES, 8)
        host_blocks, exchange = range(FIRST, FIRST + 4), folder / "exchange"
        self.disk = DiskBackEnd(BlockBytes(self.layers), host_blocks, self.file, exchange, identity)
        self._rung = threading.Event()
        self.disk.begin(self._rung.set)

    def answers(self) -> KvTierResults:
        while True:
            assert self._rung.wait(30.0)
            self._rung.clear()
            answers = self.disk.take_results()
            if answers is not None:  # a wakeup may belong to stale tables
                return answers


class Gate:
    """Blocks a file's writes or reads, after the first ``num_free`` of them."""

    def __init__(
        self, file: BlockFile, monkeypatch: pytest.MonkeyPatch, what: str = "write", num_free: int = 0
    ) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        does, self._num_free = getattr(file, what), num_free

        def blocked(*given: object) -> bool:
            if self._num_free:
                self._num_free -= 1
            else:
                self._reached.set()
                assert self._open.wait(30.0)
            return bool(does(*given))

        monkeypatch.setattr(file, what, blocked)

    def wait(self) -> None:
        """Wait until a call is blocked."""
        assert self._reached.wait(30.0)

    def open(self) -> None:
        """Unblock all calls."""
        self._open.set()


def stores(tables: int, *blocks: int, keys: list[bytes] = KEYS) -> KvTierRequests:
    """Store device blocks."""
    return KvTierRequests(tables, "disk", [Store(pack_i32(blocks), keys[: len(blocks)])])


def fetches(keys: list[bytes], *host_blocks: int) -> KvTierRequests:
    """Fetch into host blocks."""
    fetch = Fetch(b"", 1, pack_i32([0] * len(keys)), pack_i32(host_blocks), keys)
    return KvTierRequests(0, "disk", fetches=[fetch])


def test_blocks_are_fetched_as_they_were_when_the_store_was_requested(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    before = [layer.clone() for layer in bench.layers]
    bench.disk.order(stores(0, 2, 3))
    for layer in bench.layers:
        layer.zero_()  # the next plan overwrites the blocks
    answers = bench.answers()
    while len(answers.stored) < 2:
        answers.stored += bench.answers().stored
    assert answers.stored == KEYS[:2] and not answers.unstored
    assert bench.disk.stored() == KEYS[:2]
    bench.disk.order(fetches([KEYS[1], KEYS[0], KEYS[3]], FIRST + 1, FIRST, FIRST + 2))
    answers = bench.answers()
    while len(answers.fetched) + len(answers.missed) < 12:
        more = bench.answers()
        answers.fetched += more.fetched
        answers.missed += more.missed
    assert answers.fetched == pack_i32([FIRST + 1, FIRST]) and answers.missed == pack_i32([FIRST + 2])
    assert answers.fetch_ns > 0
    bench.disk.copy_in(torch.tensor([0, 4]).numpy(), torch.tensor([FIRST, FIRST + 1]).numpy())
    for layer, original in zip(bench.layers, before, strict=True):
        assert torch.equal(layer[[0, 4]], original[[2, 3]])
    bench.disk.close()


def test_stores_beyond_the_disk_speed_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_end, "MAX_WAITING_BYTES", 0)
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2, 3))
    assert bench.answers().unstored == KEYS[:2]
    bench.disk.close()
    assert not bench.disk.stored()


def test_results_belong_to_the_current_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().tables_epoch == 0
    gate = Gate(bench.file, monkeypatch)
    bench.disk.order(stores(0, 3, keys=KEYS[1:2]))
    gate.wait()  # it is being written when the tables are reset
    bench.disk.reset()
    bench.disk.order(stores(1, 4, keys=KEYS[2:3]))
    gate.open()
    answers = bench.answers()
    assert (answers.tables_epoch, answers.stored, answers.unstored) == (1, KEYS[2:3], [])
    assert bench.disk.stored() == KEYS[:3]
    bench.disk.close()


def test_a_disk_error_is_reported_in_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a block is written again and its old entry cannot be cleared."""
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored == KEYS[:1]
    write = os.pwrite

    def fails(file: int, content: bytes, offset: int) -> int:
        if bytes(content) == NOTHING:
            raise OSError(errno.EIO, "Input/output error")
        return write(file, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        bench.disk.order(stores(0, 3))
        assert bench.answers().unstored == KEYS[:1]
    bench.disk.order(stores(0, 3))
    assert bench.answers().stored == KEYS[:1]
    bench.disk.close()


def test_listing_kept_blocks_does_not_wait_for_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored
    gate = Gate(bench.file, monkeypatch)
    bench.disk.order(stores(0, 3, keys=KEYS[1:2]))
    gate.wait()
    assert bench.disk.stored() == KEYS[:1], "stored() must not wait for the write"
    gate.open()
    assert bench.answers().stored
    bench.disk.close()


def test_fetches_are_reported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(back_end.MAX_UNREPORTED, "fetch", 1)
    bench = Bench(tmp_path)
    gate = Gate(bench.file, monkeypatch, "read", num_free=1)
    bench.disk.order(fetches(KEYS[:2], FIRST, FIRST + 1))
    assert bench.answers().missed == pack_i32([FIRST])
    gate.open()
    assert bench.answers().missed == pack_i32([FIRST + 1])
    bench.disk.close()


def test_a_full_disk_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = BlockFile(tmp_path / "engine-0", b"w" * 32, 80, 8)

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        assert not any(file.write(key, memoryview(bytes(80))) for key in KEYS)
    assert len([line for line in caplog.messages if "No space left" in line]) == 1
    file.close()


def test_a_prefix_is_exported_and_imported(tmp_path: Path) -> None:
    """Export runs after pending requests, one block at a time."""
    bench, other = Bench(tmp_path / "here"), Bench(tmp_path / "there")
    bench.disk.order(stores(0, 2, 3))
    answers = bench.answers()
    while len(answers.stored) < 2:
        answers.stored += bench.answers().stored
    bench.disk.order(KvTierRequests(0, "disk", files=[FileRequest(1, "export", "a.kv", KEYS[:2])]))
    (answer,) = bench.answers().files
    assert (answer.task_id, answer.error) == (1, "") and answer.num_bytes > 2 * 2 * LAYER_BYTES
    (tmp_path / "there" / "exchange").symlink_to(tmp_path / "here" / "exchange")
    other.disk.order(KvTierRequests(0, "disk", files=[FileRequest(2, "look", "a.kv")]))
    (answer,) = other.answers().files
    assert "symbolic link" in answer.error
    (tmp_path / "there" / "exchange").unlink()
    (tmp_path / "here" / "exchange").rename(tmp_path / "there" / "exchange")
    other.disk.order(KvTierRequests(0, "disk", files=[FileRequest(3, "look", "a.kv")]))
    (answer,) = other.answers().files
    assert (answer.task_id, answer.error, answer.keys) == (3, "", KEYS[:2])
    other.disk.order(KvTierRequests(0, "disk", files=[FileRequest(4, "import", "a.kv", KEYS[:2])]))
    answers = other.answers()
    while not answers.files:
        more = other.answers()
        answers.stored += more.stored
        answers.files += more.files
    assert answers.stored == KEYS[:2] and [each.task_id for each in answers.files] == [4]
    assert other.disk.stored() == KEYS[:2]
    bench.disk.close()
    other.disk.close()


def test_fetches_do_not_wait_for_the_identity(tmp_path: Path) -> None:
    is_fetched = threading.Event()

    def identity() -> bytes:
        assert is_fetched.wait(30.0)
        return b"o" * 32

    bench = Bench(tmp_path, identity)
    bench.disk.order(KvTierRequests(0, "disk", files=[FileRequest(1, "look", "a.kv")]))
    bench.disk.order(fetches(KEYS[:1], FIRST))
    assert bench.answers().missed == pack_i32([FIRST])
    is_fetched.set()
    assert "No such file" in bench.answers().files[0].error
    bench.disk.close()


def test_unreadable_weights_fail_a_file_operation_only(tmp_path: Path) -> None:
    def identity() -> bytes:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "weights")

    bench = Bench(tmp_path, identity)
    bench.disk.order(KvTierRequests(0, "disk", files=[FileRequest(1, "look", "a.kv")]))
    assert "the weights cannot be read" in bench.answers().files[0].error
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored == KEYS[:1]
    bench.disk.close()


def test_a_disk_error_fails_a_file_operation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may report an error when the file is closed."""
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored == KEYS[:1]
    export = FileRequest(1, "export", "a.kv", KEYS[:1])
    bench.disk.order(KvTierRequests(0, "disk", files=[export]))
    assert not bench.answers().files[0].error
    close = os.close

    def fails(descriptor: int) -> None:
        is_prefix = os.readlink(f"/proc/self/fd/{descriptor}").endswith("a.kv")
        close(descriptor)
        if is_prefix:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        bench.disk.order(KvTierRequests(0, "disk", files=[FileRequest(2, "look", "a.kv")]))
        assert "Input/output error" in bench.answers().files[0].error
    bench.disk.order(stores(0, 3, keys=KEYS[1:2]))
    assert bench.answers().stored == KEYS[1:2]
    bench.disk.close()


def test_a_restarted_executor_serves_without_a_failed_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system is often mounted read-only after an error."""
    disk = KvDiskConfig(folder=str(tmp_path / "engine-0"), size_bytes=1 << 20, staging_bytes=1 << 16)
    config = config_of(tmp_path)
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, disk=disk))
    assert without_failed_disk(config) is config, "the files are created"
    Bench(tmp_path).disk.close()
    assert without_failed_disk(config) is config

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        found = without_failed_disk(config)
    assert found.cache.disk is None and "Read-only file system" in caplog.text


def test_a_block_to_be_dropped_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be slow, and the core may be replaced meanwhile."""
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored == KEYS[:1]
    gate = Gate(bench.file, monkeypatch, "drop")
    bench.disk.order(KvTierRequests(0, "disk", drops=KEYS[:1]))
    gate.wait()
    bench.disk.reset()
    assert bench.disk.stored() == []
    gate.open()
    bench.disk.close()


def test_a_dropped_block_is_a_miss(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2))
    assert bench.answers().stored == KEYS[:1]
    bench.disk.order(KvTierRequests(0, "disk", drops=KEYS[:1]))
    bench.disk.order(stores(0, 3, keys=KEYS[1:2]))
    assert bench.answers().stored == KEYS[1:2]
    assert bench.disk.stored() == bench.file.kept() == KEYS[1:2]
    bench.disk.close()
