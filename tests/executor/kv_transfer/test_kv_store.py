"""KV in a shared store, device side: requests run in threads, errors are misses, and blocks are read back unchanged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from tests.executor.kv_transfer.lmcache_server import StubServer, stub_server

from quintet.executor.kv_transfer.block_bytes import BlockBytes
from quintet.executor.kv_transfer.store import back_end
from quintet.executor.kv_transfer.store.back_end import StoreBackEnd
from quintet.executor.kv_transfer.store.chunk_format import ChunkFormat
from quintet.executor.kv_transfer.store.connector import ObjectStore, open_connector
from quintet.executor.kv_transfer.store.folder import FolderStore
from quintet.executor.kv_transfer.store.objects import FsspecStore
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import KvStoreConfig
from quintet.wire.kv_tiers import Fetch, KvTierRequests, KvTierResults, Search, Store

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
HOST_BLOCKS = range(FIRST, FIRST + 4)
KEYS = [bytes([number]) * 32 for number in range(1, 7)]
IDENTITY = b"w" * 32


class Bench:
    """Two layers of KV memory with a store, and the loop that waits for its results."""

    def __init__(
        self, connector: ObjectStore, identity: bytes = IDENTITY, waiting_bytes: int = 1 << 20
    ) -> None:
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer
            for layer in range(2)
        ]
        self.store = StoreBackEnd(BlockBytes(self.layers), HOST_BLOCKS, connector, identity, waiting_bytes)
        self._rung = threading.Event()
        self.store.begin(self._rung.set)

    def answers(self) -> KvTierResults:
        while True:
            assert self._rung.wait(30.0)
            self._rung.clear()
            answers = self.store.take_results()
            if answers is not None:  # a wakeup may belong to stale tables
                return answers

    def submit(self, requests: KvTierRequests) -> KvTierResults:
        """Send requests; return the next results."""
        self.store.order(requests)
        return self.answers()

    def put(self, blocks: list[int], keys: list[bytes]) -> bool:
        return self.submit(store(blocks, keys)).stored == keys[-1:]


def store(blocks: list[int], keys: list[bytes]) -> KvTierRequests:
    return KvTierRequests(0, "store", [Store(pack_i32(blocks), keys)])


def search(*chains: list[bytes]) -> KvTierRequests:
    return KvTierRequests(0, "store", searches=[Search(7, [*chains])])


def get(name: bytes, num_blocks: int, *wanted: tuple[int, int, bytes], tables: int = 0) -> KvTierRequests:
    """Request (position, host block, key) of a chunk."""
    positions, host_blocks, keys = zip(*wanted, strict=True)
    fetch = Fetch(name, num_blocks, pack_i32(positions), pack_i32(host_blocks), [*keys])
    return KvTierRequests(tables, "store", fetches=[fetch])


class Gate:
    """A connector with operations that block until the event is set, or that raise an error."""

    def __init__(self, inner: ObjectStore, held: str = "", error: Exception | None = None) -> None:
        self.inner, self.held, self.error = inner, held, error
        self.reached, self.opened = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def _pass(self, what: str) -> None:
        self.calls.append(what)
        if self.error is not None:
            raise self.error
        if what == self.held:
            self.reached.set()
            assert self.opened.wait(30.0)

    def count(self, names: Sequence[str]) -> int:
        self._pass("count")
        return self.inner.count(names)

    def put(self, name: str, content: memoryview) -> bool:
        self._pass("put")
        return self.inner.put(name, content)

    def get(self, name: str, into: memoryview) -> bool:
        self._pass("get")
        return self.inner.get(name, into)

    def drop(self, name: str) -> None:
        self._pass("drop")
        self.inner.drop(name)

    def close(self) -> None:
        self.inner.close()


def folder(path: Path) -> FolderStore:
    return FolderStore(path / "store", 1 << 20)


def of_fsspec(path: Path) -> ObjectStore:
    (path / "objects").mkdir()
    return FsspecStore(fsspec.filesystem("local"), str(path / "objects"))


def of_lmcache(server: StubServer) -> ObjectStore:
    return open_connector(KvStoreConfig(url=server.url, waiting_bytes=1, staging_bytes=1))


@pytest.fixture(params=[folder, of_fsspec])
def in_files(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    made: Callable[[Path], ObjectStore] = request.param
    return made(tmp_path)


@pytest.fixture(params=[folder, of_fsspec, None])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param is not None:
        yield request.param(tmp_path)
        return
    with stub_server() as server:
        opened = of_lmcache(server)
        yield opened
        opened.close()


def test_another_server_reads_blocks_as_they_were_when_stored(connector: ObjectStore) -> None:
    bench, other = Bench(connector), Bench(connector)
    before = [layer.clone() for layer in bench.layers]
    bench.store.order(store([2, 3], KEYS[:2]))
    for layer in bench.layers:
        layer.zero_()  # the next plan overwrites the blocks
    assert bench.answers().stored == KEYS[1:2]
    (found,) = other.submit(search([KEYS[1], KEYS[3]], [], [KEYS[0]])).found
    assert found.request_id == 7 and [*unpack_i32(found.counts)] == [1, 0, 0]
    answers = other.submit(get(KEYS[1], 2, (1, FIRST + 2, KEYS[1]), (0, FIRST, KEYS[0])))
    assert sorted(unpack_i32(answers.fetched)) == [FIRST, FIRST + 2] and not answers.missed + b"".join(
        answers.lost
    )
    assert answers.num_fetches == 1 and answers.fetch_ns > 0
    other.store.copy_in(np.array([0, 4], np.int32), np.array([FIRST, FIRST + 2], np.int32))
    for layer, original in zip(other.layers, before, strict=True):
        assert torch.equal(layer[[0, 4]], original[[2, 3]])
    answers = other.submit(get(KEYS[3], 2, (1, FIRST + 1, KEYS[3])))
    assert (answers.missed, answers.lost) == (pack_i32([FIRST + 1]), [KEYS[3]])
    bench.store.close()


@pytest.mark.parametrize("wrong", ["key", "position", "length", "identity"])
def test_foreign_content_is_a_miss(wrong: str, connector: ObjectStore) -> None:
    bench = Bench(connector)
    assert bench.put([2, 3], KEYS[:2])
    reader = Bench(connector, b"v" * 32 if wrong == "identity" else IDENTITY)
    key = KEYS[2] if wrong == "key" else KEYS[0]
    order = get(KEYS[1], 3 if wrong == "length" else 2, (1 if wrong == "position" else 0, FIRST, key))
    answers = reader.submit(order)
    assert (answers.fetched, answers.missed, answers.lost) == (b"", pack_i32([FIRST]), KEYS[1:2])
    reader.store.close()


def test_a_damaged_chunk_is_a_miss_and_stored_again(
    tmp_path: Path, in_files: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(in_files)
    assert bench.put([2, 3], KEYS[:2])
    (path,) = (path for path in tmp_path.rglob("*") if KEYS[1].hex() in path.name)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    wanted = ((0, FIRST, KEYS[0]), (1, FIRST + 1, KEYS[1]))
    answers = bench.submit(get(KEYS[1], 2, *wanted))
    assert (answers.fetched, answers.missed) == (pack_i32([FIRST]), pack_i32([FIRST + 1]))
    assert "is damaged" in caplog.text and not path.exists()
    assert bench.put([2, 3], KEYS[:2])
    assert len(bench.submit(get(KEYS[1], 2, *wanted)).fetched) == 8
    path.write_bytes(content[:-5])
    assert bench.put([2, 3], KEYS[:2]), "a chunk of another size must be overwritten"
    assert len(bench.submit(get(KEYS[1], 2, *wanted)).fetched) == 8
    bench.store.close()


def test_a_damaged_chunk_is_stored_again_if_the_server_removes_nothing() -> None:
    with stub_server() as server:
        bench = Bench(of_lmcache(server))
        assert bench.put([2, 3], KEYS[:2])
        ((name, content),) = server.objects.items()
        assert content is not None
        server.objects[name] = content[:-1] + bytes([content[-1] ^ 1])
        wanted = ((0, FIRST, KEYS[0]), (1, FIRST + 1, KEYS[1]))
        assert bench.submit(get(KEYS[1], 2, *wanted)).lost == KEYS[1:2]
        assert bench.put([2, 3], KEYS[:2]) and server.objects[name] == content
        assert len(bench.submit(get(KEYS[1], 2, *wanted)).fetched) == 8
        bench.store.close()


def test_a_damaged_chunk_that_cannot_be_removed_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(back_end, "BACKOFF_S", 0.1)
    connector = folder(tmp_path)
    monkeypatch.setattr(connector, "drop", drop)
    bench = Bench(connector)
    for block, key in enumerate(KEYS[:2]):
        assert bench.put([block], [key])
    (path,) = (path for path in tmp_path.rglob("*") if KEYS[1].hex() in path.name)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    wanted = search(KEYS[:2])
    assert unpack_i32(bench.submit(wanted).found[0].counts)[0] == 2
    assert not bench.submit(get(KEYS[1], 1, (0, FIRST, KEYS[1]))).fetched
    while (answers := bench.submit(wanted)).num_searches == 0:
        pass  # after an error the store is not called for a while
    assert unpack_i32(answers.found[0].counts)[0] == 1 and path.exists()
    bench.store.close()


def test_errors_are_misses_and_logged_at_intervals_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(back_end, "BACKOFF_S", 0.0)
    gate = Gate(folder(tmp_path), error=PermissionError(13, "hunter2 may not", "s3://hunter2@bucket"))
    bench = Bench(gate)
    assert not bench.put([2], KEYS[:1])
    gate.error = RuntimeError("hunter2")
    answers = bench.submit(search([KEYS[0]]))
    assert [[*unpack_i32(found.counts)] for found in answers.found] == [[0]]
    assert (answers.num_searches, answers.search_ns) == (0, 0), (
        "a failed search must not count in the search time"
    )
    assert bench.submit(get(KEYS[0], 1, (0, FIRST, KEYS[0]))).missed == pack_i32([FIRST])
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the KV store had 1 errors, the last one PermissionError (Permission denied): missing blocks are computed"
    ]
    gate.error = None
    assert bench.put([2], KEYS[:1])
    bench.store.close()


def test_a_store_is_not_called_for_a_while_after_an_error(tmp_path: Path) -> None:
    gate = Gate(folder(tmp_path), error=OSError())
    bench = Bench(gate)
    assert not bench.put([2], KEYS[:1])
    gate.error = None
    assert not bench.put([2], KEYS[:1])
    assert gate.calls == ["put"]
    bench.store.close()


def test_while_a_get_hangs_other_requests_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(folder(tmp_path), held="get")
    bench = Bench(gate)
    assert bench.put([2], KEYS[:1])
    bench.store.order(get(KEYS[0], 1, (0, FIRST, KEYS[0])))
    assert gate.reached.wait(30.0)
    monkeypatch.setattr(back_end, "BACKOFF_S", 0.0)
    (found,) = bench.submit(search([KEYS[0]])).found
    assert [*unpack_i32(found.counts)] == [0] and "count" not in gate.calls
    gate.opened.set()
    assert bench.answers().fetched == pack_i32([FIRST])
    bench.store.close()


def test_puts_are_completed_after_a_reset(tmp_path: Path) -> None:
    gate = Gate(folder(tmp_path), held="put")
    bench = Bench(gate)
    puts = [Store(pack_i32([block]), [key]) for block, key in enumerate(KEYS[:5])]
    bench.store.order(KvTierRequests(0, "store", puts))
    assert gate.reached.wait(30.0)
    bench.store.reset()
    gate.opened.set()
    bench.store.close()
    assert folder(tmp_path).count([bench.store.format.name_of(key) for key in KEYS]) == 5


def test_pending_puts_of_earlier_cores_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreBackEnd, "max_storing", 1)
    gate = Gate(folder(tmp_path), held="put")
    size = ChunkFormat(IDENTITY, 2 * LAYER_BYTES).size(1)
    bench = Bench(gate, waiting_bytes=size)
    for tables in range(3):
        if tables:
            bench.store.reset()
        puts = [Store(pack_i32([0]), [KEYS[2 * tables + number]]) for number in range(2)]
        bench.store.order(KvTierRequests(tables, "store", puts))
        assert gate.reached.wait(30.0)
    gate.opened.set()
    bench.store.close()
    names = [bench.store.format.name_of(key) for key in KEYS]
    there = [folder(tmp_path).count([name]) for name in names]
    assert there == [1, 0, 0, 1, 1, 1], "one in progress, and one copy of earlier tables"


def test_close_waits_for_the_last_put_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(folder(tmp_path), held="put")
    bench = Bench(gate)
    puts = [Store(pack_i32([block]), [key]) for block, key in enumerate(KEYS[:4])]
    bench.store.order(KvTierRequests(0, "store", puts))
    assert gate.reached.wait(30.0)
    changed, waiting = bench.store.changed, threading.Semaphore(0)
    wait = changed.wait

    def counted_wait(timeout: float | None = None) -> bool:
        if bench.store.is_closing:
            waiting.release()
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", counted_wait)
    closing = threading.Thread(target=bench.store.close)
    closing.start()
    for _ in range(StoreBackEnd.num_threads - StoreBackEnd.max_storing):
        assert waiting.acquire(timeout=30.0)
    gate.opened.set()
    closing.join()
    assert not any(thread.is_alive() for thread in bench.store._threads), "a thread is still running"
