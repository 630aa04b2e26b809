"""Fake KV back ends of an executor: contents survive executors and cores; the test releases the results."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import ClassVar

from quintet.core.engine import Engine
from quintet.core.kv.prefix import extend_chain, key_of, salt_digest
from quintet.wire import codec
from quintet.wire.config import CacheConfig, KvDiskConfig, KvPeersConfig, KvStoreConfig
from quintet.wire.kv_tiers import (
    Fetch,
    FileRequest,
    FileResult,
    KvTierRequests,
    KvTierResults,
    SearchResult,
    Store,
    TierCapacity,
    TierName,
)
from quintet.wire.step import Capacity

Content = dict[int, tuple[int, int, bytes]]
Past = dict[bytes, tuple[list[int], int]]
"""Hash of a prefix, for all that executors wrote -> tokens, and number of them."""
SALTS = ("", "a")
"""Salts of requests in worlds with a back end."""
PEER = "10.0.0.7:5600"


def names_of(past: Past, content: Content, block_size: int) -> list[bytes]:
    """Return the possible keys of a block with this content, by the tokens before it."""
    group, position, link = content[max(content)]
    tokens, num_tokens = past[link]
    assert num_tokens == position + 1 and num_tokens % block_size == 0, (group, position)
    names = []
    for salt in SALTS:
        digests: list[bytes] = []
        extend_chain(digests, salt_digest(salt), tokens, block_size, num_tokens // block_size)
        names.append(key_of(digests[-1], group))
    return names


class FakeBackEnd:
    """Contents of a back end, and results that are not sent yet."""

    tier: ClassVar[TierName]

    def __init__(self, num_staging_blocks: int = 8) -> None:
        self.num_staging_blocks = num_staging_blocks
        self.past: Past = {}
        self.answers: deque[KvTierResults] = deque()
        self.num_answers = self.num_fetched = self.num_stores = self.num_searches = 0
        self.is_losing = self.is_full = False
        """`is_losing`: contents are reported missing; `is_full`: nothing is stored."""

    @property
    def capacity(self) -> TierCapacity:
        """Its part of the executor's capacity."""
        return TierCapacity(self.tier, self.num_staging_blocks)

    def introduce(self, engine: Engine, capacity: Capacity) -> None:
        """Announce the contents to a core."""

    def submit(
        self,
        requests: KvTierRequests,
        capacity: Capacity,
        device: Mapping[int, Content],
        host: MutableMapping[int, Content],
    ) -> None:
        """Apply requests at once, answer later. device, host: contents of their blocks."""
        assert requests.tables_epoch == capacity.tables_epoch and requests.tier == self.tier
        first = capacity.num_host_blocks
        for each in takewhile(lambda each: each.tier != self.tier, capacity.tiers):
            first += each.num_staging_blocks
        results = KvTierResults(
            capacity.executor_epoch, requests.tables_epoch, self.tier, fetch_ns=1, search_ns=1
        )
        for key in requests.drops:
            self.drop(key)
        for store in requests.stores:
            self.num_stores += 1
            contents = [dict(device[block]) for block in codec.unpack_i32(store.blocks)]
            for key, content in zip(store.keys, contents, strict=True):
                assert content and (
                    not self.past or key in names_of(self.past, content, capacity.block_size)
                ), "stored under the key of another block"
            names = self.store(store, contents) if not self.is_full else []
            results.stored += names
            results.unstored += store.keys[-1:] if self.is_full else []
        for order in requests.files:
            self.submit_file(order, results)
        for search in requests.searches:
            self.num_searches += 1
            counts = [len([*takewhile(self.has, chain)]) for chain in search.chains]
            results.found.append(SearchResult(search.request_id, codec.pack_i32(counts)))
        results.num_searches = len(requests.searches)
        for fetch in requests.fetches:
            self._fetch(fetch, results, first, host)
        if requests.fetches or self.tier != "peer":  # offers have no result
            self.answers.append(results)

    def _fetch(
        self, fetch: Fetch, results: KvTierResults, first: int, host: MutableMapping[int, Content]
    ) -> None:
        columns = zip(
            codec.unpack_i32(fetch.positions), codec.unpack_i32(fetch.host_blocks), fetch.keys, strict=True
        )
        for position, block, key in columns:
            assert first <= block < first + self.num_staging_blocks, block
            content = None if self.is_losing else self.read(fetch, position, key)
            if content is None:
                self.miss(key)
                results.missed += codec.pack_i32([block])
                continue
            host[block] = dict(content)
            results.fetched += codec.pack_i32([block])
            results.num_fetches += 1
            self.num_fetched += 1
        if results.missed and fetch.source in fetch.keys:
            results.lost.append(fetch.source)

    def has(self, name: bytes) -> bool:
        """Return whether an object is present."""
        raise NotImplementedError

    def store(self, store: Store, contents: Sequence[Content]) -> list[bytes]:
        """Store blocks; return the names of the stored objects."""
        raise NotImplementedError

    def read(self, fetch: Fetch, position: int, key: bytes) -> Content | None:
        """Return a block, or None."""
        raise NotImplementedError

    def miss(self, key: bytes) -> None:
        """A block is reported missing."""

    def drop(self, key: bytes) -> None:
        """Delete a block."""
        raise NotImplementedError

    def submit_file(self, order: FileRequest, results: KvTierResults) -> None:
        """Execute a file task."""
        raise NotImplementedError

    def act(self, rng: random.Random, engine: Engine) -> None:
        """Send one result, if there is one; randomly toggle `is_losing` and lose contents."""
        self.is_losing = rng.random() < 0.1
        self.lose(rng)
        self.answer(engine)

    def lose(self, rng: random.Random) -> None:
        """Lose contents at random."""

    def answer(self, engine: Engine) -> bool:
        """Send the oldest results; return whether there were any."""
        if not self.answers:
            return False
        self.num_answers += 1
        engine.kv_results(self.answers.popleft())
        return True


class FakeDisk(FakeBackEnd):
    """Stored blocks by key."""

    tier = "disk"

    def __init__(self, num_places: int = 20, num_staging_blocks: int = 8) -> None:
        super().__init__(num_staging_blocks)
        self.num_places = num_places
        self.contents: dict[bytes, Content] = {}
        self.missed: set[bytes] = set()
        """Keys that the core may delete before it knows that they are missing."""
        self.files: dict[str, dict[bytes, Content]] = {}
        """Exported prefixes."""

    @property
    def capacity(self) -> TierCapacity:
        """As `FakeBackEnd.capacity`."""
        return TierCapacity("disk", self.num_staging_blocks, self.num_places)

    def introduce(self, engine: Engine, capacity: Capacity) -> None:
        """As `FakeBackEnd.introduce`; pending requests are dropped."""
        self.answers.clear()
        engine.kv_results(
            KvTierResults(capacity.executor_epoch, capacity.tables_epoch, "disk", [*self.contents])
        )

    def miss(self, key: bytes) -> None:
        """As `FakeBackEnd.miss`: a damaged block is deleted."""
        self.contents.pop(key, None)
        self.missed.add(key)

    def drop(self, key: bytes) -> None:
        """As `FakeBackEnd.drop`."""
        assert self.contents.pop(key, None) is not None or key in self.missed

    def store(self, store: Store, contents: Sequence[Content]) -> list[bytes]:
        """As `FakeBackEnd.store`."""
        assert self.contents.keys().isdisjoint(store.keys)
        self.contents |= zip(store.keys, contents, strict=True)
        assert len(self.contents) <= self.num_places
        return store.keys

    def read(self, fetch: Fetch, position: int, key: bytes) -> Content | None:
        """As `FakeBackEnd.read`."""
        return self.contents.get(key)

    def submit_file(self, order: FileRequest, results: KvTierResults) -> None:
        """As `FakeBackEnd.submit_file`."""
        answer = FileResult(order.task_id)
        results.files.append(answer)
        if order.verb == "export":
            self.files[order.name] = {key: self.contents[key] for key in order.keys}
            answer.num_bytes = len(order.keys)
        elif order.name not in self.files:
            answer.error = f"there is no file {order.name}"
        elif order.verb == "look":
            answer.keys = list(self.files[order.name])
        else:
            self.contents |= {key: self.files[order.name][key] for key in order.keys}
            assert len(self.contents) <= self.num_places
            results.stored += order.keys


class FakePeers(FakeBackEnd):
    """All offered blocks."""

    tier = "peer"

    def __init__(self, num_staging_blocks: int = 8) -> None:
        super().__init__(num_staging_blocks)
        self.offered: dict[bytes, Content] = {}

    def store(self, store: Store, contents: Sequence[Content]) -> list[bytes]:
        """As `FakeBackEnd.store`; offers have no result."""
        self.offered |= zip(store.keys, contents, strict=True)
        return []

    def read(self, fetch: Fetch, position: int, key: bytes) -> Content | None:
        """As `FakeBackEnd.read`."""
        assert fetch.source == PEER.encode()
        return self.offered.get(key)

    def lose(self, rng: random.Random) -> None:
        """As `FakeBackEnd.lose`."""
        for key in rng.sample([*self.offered], len(self.offered) // 8):
            del self.offered[key]


class FakeStore(FakeBackEnd):
    """Chunks by name."""

    tier = "store"

    def __init__(self, num_staging_blocks: int = 8, waiting_blocks: int = 100) -> None:
        super().__init__(num_staging_blocks)
        self.waiting_blocks = waiting_blocks
        self.runs: dict[bytes, dict[bytes, Content]] = {}
        """Name -> blocks by their keys, in order."""

    @property
    def capacity(self) -> TierCapacity:
        """As `FakeBackEnd.capacity`."""
        return TierCapacity("store", self.num_staging_blocks, max_storing_blocks=self.waiting_blocks)

    def has(self, name: bytes) -> bool:
        """As `FakeBackEnd.has`."""
        return name in self.runs

    def store(self, store: Store, contents: Sequence[Content]) -> list[bytes]:
        """As `FakeBackEnd.store`."""
        self.runs[store.keys[-1]] = dict(zip(store.keys, contents, strict=True))
        return store.keys[-1:]

    def read(self, fetch: Fetch, position: int, key: bytes) -> Content | None:
        """As `FakeBackEnd.read`."""
        chunk = self.runs.get(fetch.source)
        if chunk is None:
            return None
        assert len(chunk) == fetch.num_blocks and [*chunk][position] == key
        return chunk[key]

    def lose(self, rng: random.Random) -> None:
        """As `FakeBackEnd.lose`."""
        self.is_full = rng.random() < 0.1
        for name in rng.sample([*self.runs], len(self.runs) // 8):
            del self.runs[name]


def cache_config(back_ends: Sequence[FakeBackEnd], **options: object) -> CacheConfig:
    """Return a cache configuration with these back ends."""
    tiers = {each.tier for each in back_ends}
    return CacheConfig(
        memory_bytes=0,
        disk=KvDiskConfig(folder="", size_bytes=1, staging_bytes=1) if "disk" in tiers else None,
        peers=KvPeersConfig(role="both", listen=PEER, allowed=["10.0.0.0/8"]) if "peer" in tiers else None,
        store=KvStoreConfig(url="", waiting_bytes=1, staging_bytes=1) if "store" in tiers else None,
        **options,  # type: ignore[arg-type]
    )
