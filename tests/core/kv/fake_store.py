"""Fake shared store of an executor: contents survive all processes; the test releases the answers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import MutableMapping
from itertools import takewhile

from quintet.core.engine import Engine
from quintet.wire import codec
from quintet.wire.config import KvStoreConfig
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, LookupResult, StoreResults
from quintet.wire.step import Capacity
from tests.core.kv.fake_disk import Content, Past, names_of


class FakeStore:
    """Chunks by name, and requests that are not answered yet."""

    def __init__(self, num_staging_blocks: int = 8, waiting_blocks: int = 100) -> None:
        self.num_staging_blocks = num_staging_blocks
        self.config = KvStoreConfig(url="", waiting_bytes=64 * waiting_blocks, staging_bytes=1)
        self.runs: dict[bytes, dict[bytes, Content]] = {}
        """Name -> blocks by their keys, in order."""
        self.past: Past = {}
        self.answers: deque[KvTierResults] = deque()
        self.num_answers = self.num_fetched = self.num_puts = self.num_searches = 0
        self.is_losing = self.is_full = False
        """`is_losing`: stored chunks are reported missing; `is_full`: no chunk is accepted."""

    def submit(
        self,
        orders: KvTierRequests,
        capacity: Capacity,
        device: MutableMapping[int, Content],
        host: MutableMapping[int, Content],
    ) -> None:
        """Apply requests at once, answer later. device, host: contents of their blocks."""
        assert orders.tables == capacity.tables
        if orders.store is None:
            return
        answers = StoreResults(
            search_ns=1, get_ns=1, num_gets=len(orders.store.gets), num_searches=len(orders.store.searches)
        )
        for put in orders.store.puts:
            self.num_puts += 1
            run = dict[bytes, Content]()
            for block, key in zip(codec.unpack_i32(put.blocks), put.keys, strict=True):
                assert key in names_of(self.past, device[block], capacity.block_size), block
                run[key] = dict(device[block])
            if not self.is_full:
                self.runs[put.keys[-1]] = run
            (answers.unkept if self.is_full else answers.kept).append(put.keys[-1])
        for search in orders.store.searches:
            self.num_searches += 1
            counts = [len([*takewhile(self.runs.__contains__, chain)]) for chain in search.chains]
            answers.found.append(LookupResult(search.request_id, codec.pack_i32(counts)))
        first = capacity.num_host_blocks + capacity.num_staging_blocks + (capacity.num_peer_blocks or 0)
        for get in orders.store.gets:
            run = {} if self.is_losing else self.runs.get(get.name, {})
            assert len(run) in (0, get.num_blocks)
            if not run:
                answers.lost.append(get.name)
            positions = codec.unpack_i32(get.positions)
            for position, block, key in zip(
                positions, codec.unpack_i32(get.host_blocks), get.keys, strict=True
            ):
                assert first <= block < first + self.num_staging_blocks, block
                if run:
                    assert [*run][position] == key
                    host[block] = dict(run[key])
                    answers.fetched += codec.pack_i32([block])
                    self.num_fetched += 1
                else:
                    answers.missed += codec.pack_i32([block])
        self.answers.append(KvTierResults(capacity.executor_epoch, orders.tables, store=answers))

    def act(self, rng: random.Random, engine: Engine) -> None:
        """Answer one request, if there is one; randomly toggle `is_losing` and `is_full`, and evict chunks."""
        self.is_losing, self.is_full = rng.random() < 0.1, rng.random() < 0.1
        for name in rng.sample([*self.runs], len(self.runs) // 8):
            del self.runs[name]
        self.answer(engine)

    def answer(self, engine: Engine) -> bool:
        """Send the oldest answer; return whether there was one."""
        if not self.answers:
            return False
        self.num_answers += 1
        engine.kv_answers(self.answers.popleft())
        return True
