"""KV in a shared store, the device's half: done beside the loop, errors are misses, and bytes come back as they were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from tests.executor.kv_transfer.lmcache_server import StandIn, stand_in

from quintet.executor.kv_transfer.block_bytes import BlockBytes
from quintet.executor.kv_transfer.features import kv_store
from quintet.executor.kv_transfer.features.kv_store import StoreBlocks
from quintet.executor.kv_transfer.store.chunk_format import ChunkFormat
from quintet.executor.kv_transfer.store.connector import KvConnector, open_connector
from quintet.executor.kv_transfer.store.folder import FolderStore
from quintet.executor.kv_transfer.store.objects import ObjectStore
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import KvStoreConfig
from quintet.wire.kv_tiers import Get, KvTierRequests, KvTierResults, Put, Search, StoreRequests, StoreResults

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
KEYS = [bytes([number]) * 32 for number in range(1, 7)]
WHOSE = b"w" * 32


class Bench:
    """Two layers of KV memory with a store, and the loop that waits for its answers."""

    def __init__(self, connector: KvConnector, whose: bytes = WHOSE, waiting_bytes: int = 1 << 20) -> None:
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer
            for layer in range(2)
        ]
        self.store = StoreBlocks(BlockBytes(self.layers), connector, whose, 4, FIRST, waiting_bytes)
        self._rung = threading.Event()
        self.store.begin(self._rung.set)

    def answers(self) -> KvTierResults:
        while True:
            assert self._rung.wait(30.0)
            self._rung.clear()
            answers = self.store.take_results()
            if answers is not None:  # a ring may have been for tables that are gone
                return answers

    def told(self, orders: StoreRequests, tables: int = 0) -> StoreResults:
        """Give orders; return the next answers."""
        self.store.order(KvTierRequests(tables, store=orders))
        answers = self.answers().store
        assert answers is not None
        return answers

    def put(self, blocks: list[int], keys: list[bytes]) -> bool:
        answers = self.told(StoreRequests([Put(pack_i32(blocks), keys)]))
        return answers.kept == keys[-1:]


def get(name: bytes, num_blocks: int, *wanted: tuple[int, int, bytes]) -> StoreRequests:
    """Order (position, host block, key) of a run."""
    positions, host_blocks, keys = zip(*wanted, strict=True)
    return StoreRequests(gets=[Get(name, num_blocks, pack_i32(positions), pack_i32(host_blocks), [*keys])])


class Gate:
    """A connector whose answers wait until somebody opens, or which has an error."""

    def __init__(self, inner: KvConnector, held: str = "", error: Exception | None = None) -> None:
        self.inner, self.held, self.error = inner, held, error
        self.come, self.opened = threading.Event(), threading.Event()
        self.asked: list[str] = []

    def _pass(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error
        if what == self.held:
            self.come.set()
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
    return ObjectStore(fsspec.filesystem("local"), str(path / "objects"))


def of_lmcache(server: StandIn) -> KvConnector:
    return open_connector(KvStoreConfig(url=server.url, waiting_bytes=1, staging_bytes=1))


@pytest.fixture(params=[folder, of_fsspec])
def in_files(request: pytest.FixtureRequest, tmp_path: Path) -> KvConnector:
    made: Callable[[Path], KvConnector] = request.param
    return made(tmp_path)


@pytest.fixture(params=[folder, of_fsspec, None])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvConnector]:
    if request.param is not None:
        yield request.param(tmp_path)
        return
    with stand_in() as server:
        opened = of_lmcache(server)
        yield opened
        opened.close()


def test_blocks_come_to_another_server_as_they_were_when_they_were_ordered(connector: KvConnector) -> None:
    bench, other = Bench(connector), Bench(connector)
    before = [layer.clone() for layer in bench.layers]
    bench.store.order(KvTierRequests(0, store=StoreRequests([Put(pack_i32([2, 3]), KEYS[:2])])))
    for layer in bench.layers:
        layer.zero_()  # the next plan gives the blocks other contents
    assert (answers := bench.answers().store) is not None and answers.kept == KEYS[1:2]
    (found,) = other.told(StoreRequests(searches=[Search(7, [[KEYS[1], KEYS[3]], [], [KEYS[0]]])])).found
    assert found.request_id == 7 and [*unpack_i32(found.counts)] == [1, 0, 0]
    answers = other.told(get(KEYS[1], 2, (1, FIRST + 2, KEYS[1]), (0, FIRST, KEYS[0])))
    assert sorted(unpack_i32(answers.fetched)) == [FIRST, FIRST + 2] and not answers.missed + b"".join(
        answers.lost
    )
    assert answers.num_gets == 1 and answers.get_ns > 0
    other.store.copy_in(np.array([0, 4], np.int32), np.array([FIRST, FIRST + 2], np.int32))
    for layer, original in zip(other.layers, before, strict=True):
        assert torch.equal(layer[[0, 4]], original[[2, 3]])
    answers = other.told(get(KEYS[3], 2, (1, FIRST + 1, KEYS[3])))
    assert (answers.missed, answers.lost) == (pack_i32([FIRST + 1]), [KEYS[3]])
    bench.store.close()


@pytest.mark.parametrize("wrong", ["key", "position", "length", "whose"])
def test_another_content_is_not_taken(wrong: str, connector: KvConnector) -> None:
    bench = Bench(connector)
    assert bench.put([2, 3], KEYS[:2])
    reader = Bench(connector, b"v" * 32 if wrong == "whose" else WHOSE)
    key = KEYS[2] if wrong == "key" else KEYS[0]
    order = get(KEYS[1], 3 if wrong == "length" else 2, (1 if wrong == "position" else 0, FIRST, key))
    answers = reader.told(order)
    assert (answers.fetched, answers.missed, answers.lost) == (b"", pack_i32([FIRST]), KEYS[1:2])
    reader.store.close()


def test_a_damaged_run_is_a_miss_and_put_anew(
    tmp_path: Path, in_files: KvConnector, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(in_files)
    assert bench.put([2, 3], KEYS[:2])
    (path,) = (path for path in tmp_path.rglob("*") if KEYS[1].hex() in path.name)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    wanted = ((0, FIRST, KEYS[0]), (1, FIRST + 1, KEYS[1]))
    answers = bench.told(get(KEYS[1], 2, *wanted))
    assert (answers.fetched, answers.missed) == (pack_i32([FIRST]), pack_i32([FIRST + 1]))
    assert "is damaged" in caplog.text and not path.exists()
    assert bench.put([2, 3], KEYS[:2])
    assert len(bench.told(get(KEYS[1], 2, *wanted)).fetched) == 8
    path.write_bytes(content[:-5])
    assert bench.put([2, 3], KEYS[:2]), "one of another size is written over"
    assert len(bench.told(get(KEYS[1], 2, *wanted)).fetched) == 8
    bench.store.close()


def test_a_damaged_run_of_a_server_that_removes_nothing_is_put_anew() -> None:
    with stand_in() as server:
        bench = Bench(of_lmcache(server))
        assert bench.put([2, 3], KEYS[:2])
        ((name, content),) = server.objects.items()
        assert content is not None
        server.objects[name] = content[:-1] + bytes([content[-1] ^ 1])
        wanted = ((0, FIRST, KEYS[0]), (1, FIRST + 1, KEYS[1]))
        assert bench.told(get(KEYS[1], 2, *wanted)).lost == KEYS[1:2]
        assert bench.put([2, 3], KEYS[:2]) and server.objects[name] == content
        assert len(bench.told(get(KEYS[1], 2, *wanted)).fetched) == 8
        bench.store.close()


def test_what_is_damaged_and_cannot_be_removed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kv_store, "BACKOFF_S", 0.1)
    connector = folder(tmp_path)
    monkeypatch.setattr(connector, "drop", drop)
    bench = Bench(connector)
    for block, key in enumerate(KEYS[:2]):
        assert bench.put([block], [key])
    (path,) = (path for path in tmp_path.rglob("*") if KEYS[1].hex() in path.name)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    search = StoreRequests(searches=[Search(7, [KEYS[:2]])])
    assert unpack_i32(bench.told(search).found[0].counts)[0] == 2
    assert not bench.told(get(KEYS[1], 1, (0, FIRST, KEYS[1]))).fetched
    while (answers := bench.told(search)).num_searches == 0:
        pass  # after the error it is not asked for a moment
    assert unpack_i32(answers.found[0].counts)[0] == 1 and path.exists()
    bench.store.close()


def test_errors_are_misses_and_told_of_now_and_then_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "BACKOFF_S", 0.0)
    gate = Gate(folder(tmp_path), error=PermissionError(13, "hunter2 may not", "s3://hunter2@bucket"))
    bench = Bench(gate)
    assert not bench.put([2], KEYS[:1])
    gate.error = RuntimeError("hunter2")
    answers = bench.told(StoreRequests(searches=[Search(7, [[KEYS[0]]])]))
    assert [[*unpack_i32(found.counts)] for found in answers.found] == [[0]]
    assert (answers.num_searches, answers.search_ns) == (0, 0), "it says nothing of how long a search takes"
    assert bench.told(get(KEYS[0], 1, (0, FIRST, KEYS[0]))).missed == pack_i32([FIRST])
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the KV store had 1 errors, the last one PermissionError (Permission denied): missing blocks are computed"
    ]
    gate.error = None
    assert bench.put([2], KEYS[:1])
    bench.store.close()


def test_a_store_that_had_an_error_is_not_asked_for_a_moment(tmp_path: Path) -> None:
    gate = Gate(folder(tmp_path), error=OSError())
    bench = Bench(gate)
    assert not bench.put([2], KEYS[:1])
    gate.error = None
    assert not bench.put([2], KEYS[:1])
    assert gate.asked == ["put"]
    bench.store.close()


def test_while_a_get_hangs_others_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(folder(tmp_path), held="get")
    bench = Bench(gate)
    assert bench.put([2], KEYS[:1])
    bench.store.order(KvTierRequests(0, store=get(KEYS[0], 1, (0, FIRST, KEYS[0]))))
    assert gate.come.wait(30.0)
    monkeypatch.setattr(kv_store, "BACKOFF_S", 0.0)
    (found,) = bench.told(StoreRequests(searches=[Search(7, [[KEYS[0]]])])).found
    assert [*unpack_i32(found.counts)] == [0] and "count" not in gate.asked
    gate.opened.set()
    assert (answers := bench.answers().store) is not None and answers.fetched == pack_i32([FIRST])
    bench.store.close()


def test_what_comes_for_tables_that_are_gone_is_nobodys(tmp_path: Path) -> None:
    gate = Gate(folder(tmp_path), held="get")
    bench = Bench(gate)
    assert bench.put([2], KEYS[:1]) and bench.put([3], KEYS[1:2])
    bench.store.order(KvTierRequests(0, store=get(KEYS[0], 1, (0, FIRST, KEYS[0]))))
    assert gate.come.wait(30.0)
    bench.store.reset()
    gate.held = ""
    answers = bench.told(get(KEYS[1], 1, (0, FIRST, KEYS[1])), tables=1)
    assert answers.fetched == pack_i32([FIRST])
    gate.opened.set()
    bench.store.close()  # the late one has ended
    bench.store.copy_in(np.array([0], np.int32), np.array([FIRST], np.int32))
    assert torch.equal(bench.layers[0][0], bench.layers[0][3]), (
        "nothing was written over what came for the new ones"
    )
    assert bench.store.take_results() is None


def test_what_is_to_be_kept_is_kept_whatever_becomes_of_the_tables(tmp_path: Path) -> None:
    gate = Gate(folder(tmp_path), held="put")
    bench = Bench(gate)
    puts = [Put(pack_i32([block]), [key]) for block, key in enumerate(KEYS[:5])]
    bench.store.order(KvTierRequests(0, store=StoreRequests(puts)))
    assert gate.come.wait(30.0)
    bench.store.reset()
    gate.opened.set()
    bench.store.close()
    assert folder(tmp_path).count([bench.store._format.name_of(key) for key in KEYS]) == 5


def test_of_what_cores_before_wanted_kept_no_more_waits_than_one_may_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "NUM_PUTTERS", 1)
    gate = Gate(folder(tmp_path), held="put")
    size = ChunkFormat(WHOSE, 2 * LAYER_BYTES).size(1)
    bench = Bench(gate, waiting_bytes=size)
    for tables in range(3):
        puts = [Put(pack_i32([0]), [KEYS[2 * tables + number]]) for number in range(2)]
        bench.store.order(KvTierRequests(tables, store=StoreRequests(puts)))
        assert gate.come.wait(30.0)
    gate.opened.set()
    bench.store.close()
    names = [bench.store._format.name_of(key) for key in KEYS]
    there = [folder(tmp_path).count([name]) for name in names]
    assert there[4:] == [1, 1] and sum(there) < 6


def test_the_end_waits_for_the_last_put_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(folder(tmp_path), held="put")
    bench = Bench(gate)
    puts = [Put(pack_i32([block]), [key]) for block, key in enumerate(KEYS[:4])]
    bench.store.order(KvTierRequests(0, store=StoreRequests(puts)))
    assert gate.come.wait(30.0)
    changed, waiting = bench.store._changed, threading.Semaphore(0)
    wait = changed.wait

    def told_of_wait(timeout: float | None = None) -> bool:
        if bench.store._is_closing:
            waiting.release()
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", told_of_wait)
    closing = threading.Thread(target=bench.store.close)
    closing.start()
    for _ in range(kv_store.NUM_THREADS - kv_store.NUM_PUTTERS):
        assert waiting.acquire(timeout=30.0)
    gate.opened.set()
    closing.join()
    assert not any(thread.is_alive() for thread in bench.store._threads), "some were told of no end"


def test_a_mistake_in_a_thread_is_the_end_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(folder(tmp_path))
    monkeypatch.setattr(bench.store._format, "finish", lambda *_: 1 // 0)
    bench.store.order(KvTierRequests(0, store=StoreRequests([Put(pack_i32([2]), KEYS[:1])])))
    with pytest.raises(RuntimeError, match="KV store thread failed"):
        bench.answers()
