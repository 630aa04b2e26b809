"""Every KV back end with damaged, foreign, dead or hanging storage: blocks are missed, and steps do not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zmq
from tests.executor.kv_transfer.lmcache_server import stub_server
from tests.executor.kv_transfer.test_kv_nixl import StubAgent
from tests.processes.test_disaggregation import free_port

from quintet.executor.kv_transfer.back_end import BackEnd
from quintet.executor.kv_transfer.block_bytes import BlockBytes
from quintet.executor.kv_transfer.disk import block_file
from quintet.executor.kv_transfer.disk.back_end import DiskBackEnd
from quintet.executor.kv_transfer.disk.block_file import BlockFile
from quintet.executor.kv_transfer.peers import kv_server
from quintet.executor.kv_transfer.peers.back_end import PeerBackEnd
from quintet.executor.kv_transfer.peers.keys import PeerKey
from quintet.executor.kv_transfer.peers.kv_server import OfferedBlocks
from quintet.executor.kv_transfer.peers.messages import OwnIdentity
from quintet.executor.kv_transfer.store.back_end import StoreBackEnd
from quintet.executor.kv_transfer.store.connector import ObjectStore, open_connector
from quintet.executor.kv_transfer.store.folder import FolderStore
from quintet.executor.kv_transfer.store.nixl import NixlStore
from quintet.executor.kv_transfer.store.objects import FsspecStore
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import KvStoreConfig
from quintet.wire.kv_tiers import Fetch, KvTierRequests, KvTierResults, Store, TierName

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
HOST_BLOCKS = range(FIRST, FIRST + 4)
KEYS = [bytes([number]) * 32 for number in range(1, 4)]
IDENTITY, FOREIGN = b"w" * 32, b"x" * 32
KEY = PeerKey(*zmq.curve_keypair())
Read = Callable[..., Any]
"""Reads the storage; the last argument is the memory to fill, if there is one."""


class Fault:
    """Effect on all reads of a storage."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_damaging = False
        self.reached, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def wrap(self, read: Read) -> Read:
        """Return the read with the fault."""

        def faulty(*given: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(30.0)
            if self.error is not None:
                raise self.error
            result = read(*given)
            if self.is_damaging:
                given[-1][-1] ^= 1
            return result

        return faulty


class Rig:
    """A back end with the contents of device blocks 2 and 3, and the loop that waits for its results."""

    tier: TierName

    def __init__(self, folder: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fault, self.monkeypatch = folder, fault, monkeypatch
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer
            for layer in range(2)
        ]
        self.source = b""
        self.num_blocks = 2
        self.positions = [0, 1]
        self.closed = ExitStack()
        self.back_end = self.open(IDENTITY)
        self._rung = threading.Event()
        self.start(self.back_end)

    def start(self, back_end: BackEnd) -> BackEnd:
        """Start a back end, and close it after the test."""
        self.closed.callback(back_end.close)
        back_end.begin(self._rung.set)
        return back_end

    def open(self, identity: bytes) -> BackEnd:
        """Return the back end for blocks of this identity."""
        raise NotImplementedError

    def fill(self) -> None:
        """Store the blocks."""
        store = Store(pack_i32([2, 3]), KEYS[:2])
        self.back_end.order(KvTierRequests(0, self.tier, [store]))
        names = KEYS[:2] if self.tier == "disk" else KEYS[1:2]
        stored: list[bytes] = []
        while len(stored) < len(names):
            stored += self.results().stored
        assert stored == names

    def fetch(self, host_block: int = FIRST, tables: int = 0) -> KvTierRequests:
        """Fetch both blocks."""
        host_blocks = pack_i32([host_block, host_block + 1])
        fetch = Fetch(self.source, self.num_blocks, pack_i32(self.positions), host_blocks, KEYS[:2])
        return KvTierRequests(tables, self.tier, fetches=[fetch])

    def results(self) -> KvTierResults:
        """Wait for the next results."""
        while True:
            assert self._rung.wait(30.0)
            self._rung.clear()
            results = self.back_end.take_results()
            if results is not None:  # a wakeup may belong to stale tables
                return results

    def outcome(self, host_block: int = FIRST, tables: int = 0) -> tuple[list[int], list[int]]:
        """Fetch both blocks; return the host blocks that were filled, and the others."""
        self.back_end.order(self.fetch(host_block, tables))
        fetched, missed = list[int](), list[int]()
        while len(fetched) + len(missed) < 2:
            results = self.results()
            assert (results.tier, results.tables_epoch) == (self.tier, tables)
            fetched += unpack_i32(results.fetched)
            missed += unpack_i32(results.missed)
        return sorted(fetched), sorted(missed)

    def is_filled(self, host_blocks: Sequence[int]) -> bool:
        """Return whether these host blocks hold the contents of device blocks 2 and 3."""
        self.back_end.copy_in(np.array([0, 1], np.int32), np.array(host_blocks, np.int32))
        return all(torch.equal(layer[:2], layer[2:4]) for layer in self.layers)


READ_WHOLE, GET_OFFERED = block_file.read_whole, OfferedBlocks.get


class DiskRig(Rig):
    tier = "disk"

    def open(self, identity: bytes) -> BackEnd:
        wrapped = self.fault.wrap(lambda file, offset, into: READ_WHOLE(file, into, offset))
        self.monkeypatch.setattr(
            block_file, "read_whole", lambda file, into, offset: wrapped(file, offset, into)
        )
        file = BlockFile(self.folder / "engine-0", identity, 2 * LAYER_BYTES, 8)
        return DiskBackEnd(BlockBytes(self.layers), HOST_BLOCKS, file, self.folder, lambda: identity)


class PeerRig(Rig):
    tier = "peer"

    def open(self, identity: bytes) -> BackEnd:
        self.num_blocks, self.positions = 1, [0, 0]
        return self._side(identity, "")

    def _side(self, identity: bytes, listen: str) -> PeerBackEnd:
        parts = {"weights": identity.hex()}
        return PeerBackEnd(BlockBytes(self.layers), HOST_BLOCKS, OwnIdentity(KEY, identity, parts), listen, 8)

    def fill(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.source = address.encode()
        server = self.start(self._side(IDENTITY, address))
        server.order(KvTierRequests(0, "peer", [Store(pack_i32([2, 3]), KEYS[:2])]))
        given = self.fault.wrap(GET_OFFERED)

        def get(offered: OfferedBlocks, key: bytes) -> bytes | None:
            try:
                return given(offered, key) if not self.fault.is_damaging else GET_OFFERED(offered, key)
            except OSError:
                return None

        self.monkeypatch.setattr(OfferedBlocks, "get", get)
        digest_of = kv_server.digest_of
        self.monkeypatch.setattr(
            kv_server,
            "digest_of",
            lambda *given: b"d" * 32 if self.fault.is_damaging else digest_of(*given),
        )


class StoreRig(Rig):
    tier = "store"

    def open(self, identity: bytes) -> BackEnd:
        self.source = KEYS[1]
        connector = self.connector()
        self.monkeypatch.setattr(connector, "get", self.fault.wrap(connector.get))
        return StoreBackEnd(BlockBytes(self.layers), HOST_BLOCKS, connector, identity, 1 << 20)

    def connector(self) -> ObjectStore:
        """Return a connector to the store."""
        return FolderStore(self.folder / "store", 1 << 20)


class FsspecRig(StoreRig):
    def connector(self) -> ObjectStore:
        (self.folder / "objects").mkdir(exist_ok=True)
        return FsspecStore(fsspec.filesystem("local"), str(self.folder / "objects"))


class LmCacheRig(StoreRig):
    def connector(self) -> ObjectStore:
        if not hasattr(self, "server"):
            self.server = self.closed.enter_context(stub_server())
        return open_connector(KvStoreConfig(url=self.server.url, waiting_bytes=1, staging_bytes=1))


class NixlRig(StoreRig):
    def connector(self) -> ObjectStore:
        if not hasattr(self, "agent"):
            self.agent = StubAgent()
        return NixlStore(self.agent, "prefix")


@pytest.fixture(params=[DiskRig, PeerRig, StoreRig, FsspecRig, LmCacheRig, NixlRig])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    fault = Fault()
    made: Rig = request.param(tmp_path, fault, monkeypatch)
    made.fill()
    yield made
    fault.opened.set()
    made.closed.close()


def test_intact_blocks_are_fetched_unchanged(rig: Rig) -> None:
    assert rig.outcome() == ([FIRST, FIRST + 1], []) and rig.is_filled([FIRST, FIRST + 1])


def test_damaged_blocks_are_missed(rig: Rig) -> None:
    rig.fault.is_damaging = True
    fetched, missed = rig.outcome()
    assert FIRST + 1 in missed and len(fetched) + len(missed) == 2


def test_unknown_blocks_are_missed(rig: Rig) -> None:
    rig.source = KEYS[2] if rig.tier == "store" else rig.source
    request = rig.fetch()
    request.fetches[0].keys = [KEYS[2], KEYS[2]]
    rig.back_end.order(request)
    missed = list[int]()
    while len(missed) < 2:
        results = rig.results()
        assert not results.fetched
        missed += unpack_i32(results.missed)


def test_blocks_of_another_identity_are_missed(rig: Rig) -> None:
    rig.back_end = rig.start(rig.open(FOREIGN))
    assert rig.outcome() == ([], [FIRST, FIRST + 1])


def test_dead_storage_is_a_miss(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.fault.error = OSError(5, "hunter2")
    assert rig.outcome() == ([], [FIRST, FIRST + 1])
    assert "hunter2" not in caplog.text or rig.tier == "disk", "the text of a store may contain secrets"


def test_steps_do_not_wait_for_hanging_storage(rig: Rig) -> None:
    """Requests, results and copies return; late results belong to no later tables."""
    rig.fault.opened.clear()
    rig.back_end.order(rig.fetch())
    assert rig.fault.reached.wait(30.0)
    assert rig.back_end.take_results() is None
    rig.back_end.copy_in(np.array([0], np.int32), np.array([FIRST + 3], np.int32))
    rig.back_end.reset()
    rig.fault.opened.set()
    assert rig.outcome(FIRST + 2, tables=1) == ([FIRST + 2, FIRST + 3], [])
    assert rig.is_filled([FIRST + 2, FIRST + 3])
    results = rig.back_end.take_results()
    assert results is None or not results.fetched + results.missed, "a result of earlier tables"


def test_hanging_storage_does_not_delay_the_exit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(rig.back_end), "close_timeout_s", 0.05)
    rig.fault.opened.clear()
    rig.back_end.order(rig.fetch())
    assert rig.fault.reached.wait(30.0)
    rig.back_end.close()
    assert not rig.fault.opened.is_set()


def test_a_bug_in_a_thread_ends_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.back_end, "report_fetch", lambda *_: 1 // 0)
    rig.back_end.order(rig.fetch())
    with pytest.raises(RuntimeError, match=f"a KV {rig.tier} thread failed"):
        rig.results()
