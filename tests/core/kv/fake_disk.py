"""Fake disk tier of an executor: contents survive executors and cores; the test releases the answers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import MutableMapping

from quintet.core.engine import Engine
from quintet.core.kv.prefix import extend_chain, key_of, salt_digest
from quintet.wire import codec
from quintet.wire.config import KvDiskConfig
from quintet.wire.kv_tiers import FileRequest, FileResult, KvTierRequests, KvTierResults, StoredBlocks
from quintet.wire.step import Capacity

Content = dict[int, tuple[int, int, bytes]]
Past = dict[bytes, tuple[list[int], int]]
"""Hash of a prefix, for all that executors wrote -> tokens, and number of them."""
SALTS = ("", "a")
"""Salts of requests in worlds with a disk."""


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


class FakeDisk:
    """Stored blocks, and requests that are not answered yet."""

    def __init__(self, num_places: int, num_staging_blocks: int = 8) -> None:
        self.num_places = num_places
        self.num_staging_blocks = num_staging_blocks
        self.config = KvDiskConfig(folder="", size_bytes=1, staging_bytes=1)
        self.contents: dict[int, tuple[bytes, Content]] = {}
        self.files: dict[str, dict[bytes, Content]] = {}
        """Exported prefixes."""
        self.past: Past = {}
        self.answers: deque[KvTierResults] = deque()
        self.num_fetched = self.num_answers = 0
        self.is_losing = False
        """True: stored blocks are reported missing."""
        self._epoch = 0

    def introduce(self, engine: Engine, capacity: Capacity) -> None:
        """Announce the stored blocks to a core; pending requests are dropped."""
        self.answers.clear()
        self._epoch = capacity.executor_epoch
        places = sorted(self.contents)
        keys = [self.contents[place][0] for place in places]
        kept = StoredBlocks(capacity.executor_epoch, capacity.tables, codec.pack_i32(places), keys)
        engine.tier_client.add_stored(kept)

    def submit(
        self,
        orders: KvTierRequests,
        capacity: Capacity,
        device: MutableMapping[int, Content],
        host: MutableMapping[int, Content],
    ) -> None:
        """Apply requests at once, answer later. device, host: contents of their blocks."""
        assert orders.tables == capacity.tables
        answers = KvTierResults(self._epoch, orders.tables, fetch_ns=1)
        for place, key in zip(codec.unpack_i32(orders.drops), orders.drop_keys, strict=True):
            assert self.contents[place][0] == key
            del self.contents[place]
        stores = codec.unpack_i32(orders.stores)
        for block, place, key in zip(stores[::2], stores[1::2], orders.store_keys, strict=True):
            assert 0 <= place < self.num_places and device[block], block
            assert key in names_of(self.past, device[block], capacity.block_size), (
                "stored under the key of another block",
                block,
            )
            self.contents[place] = key, dict(device[block])
            answers.stored.append(key)
        for order in orders.files:
            self._submit_file(order, answers)
        fetches = codec.unpack_i32(orders.fetches)
        fetched, missed = list[int](), list[int]()
        first = capacity.num_host_blocks
        for place, block, key in zip(fetches[::2], fetches[1::2], orders.fetch_keys, strict=True):
            assert first <= block < first + self.num_staging_blocks, block
            kept, content = self.contents.get(place, (b"", {}))
            if kept != key or self.is_losing:
                missed.append(block)
                continue
            host[block] = dict(content)
            fetched.append(block)
            self.num_fetched += 1
        answers.fetched, answers.missed = codec.pack_i32(fetched), codec.pack_i32(missed)
        self.answers.append(answers)

    def _submit_file(self, order: FileRequest, answers: KvTierResults) -> None:
        answer = FileResult(order.task_id)
        answers.files.append(answer)
        places = codec.unpack_i32(order.places)
        if order.verb == "export":
            self.files[order.name] = dict(self.contents[place] for place in places)
            assert list(self.files[order.name]) == order.keys
            answer.num_bytes = len(order.keys)
        elif order.name not in self.files:
            answer.error = f"there is no file {order.name}"
        elif order.verb == "look":
            answer.keys = list(self.files[order.name])
        else:
            for place, key in zip(places, order.keys, strict=True):
                self.contents[place] = key, self.files[order.name][key]
                answers.stored.append(key)

    def act(self, rng: random.Random, engine: Engine) -> None:
        """Answer one request, if there is one; randomly toggle `is_losing`."""
        self.is_losing = rng.random() < 0.1
        self.answer(engine)

    def answer(self, engine: Engine) -> bool:
        """Send the oldest answer; return whether there was one."""
        if not self.answers:
            return False
        self.num_answers += 1
        engine.kv_answers(self.answers.popleft())
        return True
