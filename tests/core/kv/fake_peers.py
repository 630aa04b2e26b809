"""Fake peer servers of an executor: offers survive it; the test releases the answers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import MutableMapping

from quintet.core.engine import Engine
from quintet.wire import codec
from quintet.wire.config import KvPeersConfig
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults
from quintet.wire.step import Capacity
from tests.core.kv.fake_disk import Content

PEER = "10.0.0.7:5600"


class FakePeers:
    """All offered blocks, and requests that are not answered yet."""

    def __init__(self, num_staging_blocks: int = 8) -> None:
        self.num_staging_blocks = num_staging_blocks
        self.config = KvPeersConfig(role="both", listen=PEER, allowed=["10.0.0.0/8"])
        self.offered: dict[bytes, Content] = {}
        self.answers: deque[KvTierResults] = deque()
        self.num_answers = self.num_fetched = 0
        self.is_losing = False
        """True: offered blocks are reported missing."""

    def submit(
        self,
        orders: KvTierRequests,
        capacity: Capacity,
        device: MutableMapping[int, Content],
        host: MutableMapping[int, Content],
    ) -> None:
        """Apply requests at once, answer later. device, host: contents of their blocks."""
        assert orders.tables == capacity.tables
        for block, key in zip(codec.unpack_i32(orders.offers), orders.offer_keys, strict=True):
            assert device[block], block
            self.offered[key] = dict(device[block])
        fetched, lacking = list[int](), list[int]()
        first = capacity.num_host_blocks + capacity.num_staging_blocks
        for pull in orders.pulls:
            assert pull.peer == PEER
            for block, key in zip(codec.unpack_i32(pull.host_blocks), pull.keys, strict=True):
                assert first <= block < first + self.num_staging_blocks, block
                if key not in self.offered or self.is_losing:
                    lacking.append(block)
                    continue
                host[block] = dict(self.offered[key])
                fetched.append(block)
                self.num_fetched += 1
        if fetched or lacking:
            packed = {"pulled": codec.pack_i32(fetched), "lacking": codec.pack_i32(lacking)}
            self.answers.append(KvTierResults(capacity.executor_epoch, orders.tables, **packed))

    def act(self, rng: random.Random, engine: Engine) -> None:
        """Answer one request, if there is one; randomly toggle `is_losing` and evict offers."""
        self.is_losing = rng.random() < 0.1
        for key in rng.sample([*self.offered], len(self.offered) // 8):
            del self.offered[key]
        self.answer(engine)

    def answer(self, engine: Engine) -> bool:
        """Send the oldest answer; return whether there was one."""
        if not self.answers:
            return False
        self.num_answers += 1
        engine.kv_answers(self.answers.popleft())
        return True
