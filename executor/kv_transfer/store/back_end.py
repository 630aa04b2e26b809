"""Store back end, device half: chunks of blocks as objects of a store that several servers share.

A connector's error is a result, and the store is not used for a while after it, or while a request hangs. Stores never
occupy all threads. A damaged object counts as a miss. The core decides which chunks to look up and to store
(`quintet.core.kv.store_pool`).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from errno import errorcode
from functools import partial
from typing import TypeVar

import numpy as np

from quintet.executor.kv_transfer.back_end import BackEnd, Task, copy_out
from quintet.executor.kv_transfer.block_bytes import Bytes, Wait, WholeBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.store.chunk_format import ChunkFormat
from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED, ObjectStore, open_connector
from quintet.process.log import LogLimit
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig, KvStoreConfig
from quintet.wire.kv_tiers import Fetch, KvTierRequests, Search, SearchResult, Store, TierCapacity

log = logging.getLogger(__name__)
ValueT = TypeVar("ValueT")

BACKOFF_S = 5.0
"""Time without requests to a store after an error, and the timeout that counts as an error."""


class StoreBackEnd(BackEnd):
    """Stores KV blocks in a shared object store (`quintet.executor.kv_transfer.store.connector`)."""

    tier = "store"
    num_threads = 8
    max_storing = 3

    def __init__(
        self,
        blocks: WholeBlocks,
        host_blocks: range,
        connector: ObjectStore,
        identity: bytes,
        waiting_bytes: int,
    ) -> None:
        """identity: the portable identity of the blocks.

        waiting_bytes: limit on a core's unfinished copies; the same amount may be left from earlier cores.
        """
        super().__init__(blocks, host_blocks)
        self.format = ChunkFormat(identity, blocks.block_bytes)
        self._connector = connector
        self._waiting_bytes = waiting_bytes
        self._damaged: dict[str, None] = {}
        """Damaged objects, treated as missing; oldest first."""
        self._backoff_until_s = 0.0
        self._errors = LogLimit()

    @property
    def capacity(self) -> TierCapacity:
        max_storing_blocks = self._waiting_bytes // self.blocks.block_bytes
        return TierCapacity("store", len(self.host_blocks), max_storing_blocks=max_storing_blocks)

    def store_tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        for store in requests.stores:
            content, blocks = self.format.new(len(store.keys))
            wait = copy_out(self.blocks, np.frombuffer(store.blocks, np.int32), blocks)
            run = partial(self._store, store, content, blocks, wait)
            yield Task("store", requests.tables_epoch, run, len(content))

    def cancel(self) -> None:
        """See `BackEnd.cancel`. Queued stores are limited: the core counts only the copies for its own tables."""
        super().cancel()
        left, kept = self._waiting_bytes, deque[Task]()
        for task in reversed(self.queues["store"]):
            left -= task.num_bytes
            if left < 0:
                break
            kept.appendleft(task)
        self.queues["store"] = kept

    def close_storage(self) -> None:
        self._connector.close()

    # --- the threads' side ---

    def run_search(self, search: Search, task: Task) -> None:
        begun_ns = time.monotonic_ns()
        counts = [self._num_present([self.format.name_of(key) for key in chain]) for chain in search.chains]
        with self.changed:
            if task.tables_epoch != self.tables_epoch:
                return
            found = SearchResult(search.request_id, pack_i32(count or 0 for count in counts))
            self.results.found.append(found)
            if None not in counts:  # failed lookups would distort the measured time
                self.results.num_searches += 1
                self.results.search_ns += time.monotonic_ns() - begun_ns
            self.report()

    def _num_present(self, names: list[str]) -> int | None:
        """Return the number of leading objects that exist; None if the store did not answer."""
        with self.changed:
            candidates = list(itertools.takewhile(lambda name: name not in self._damaged, names))
        return self._call(None, lambda: self._connector.count(candidates)) if candidates else 0

    def run_fetch(self, fetch: Fetch, task: Task) -> None:
        name, host_blocks = self.format.name_of(fetch.source), unpack_i32(fetch.host_blocks)
        content, blocks = self.format.new(fetch.num_blocks)
        is_there = self._call(False, lambda: self._connector.get(name, content.data))
        wanted = zip(unpack_i32(fetch.positions), host_blocks, fetch.keys, strict=True)
        whole = {
            host_block: position
            for position, host_block, key in wanted
            if is_there and self.format.is_block(content, blocks, position, key)
        }
        if is_there and len(whole) < len(host_blocks):
            log.warning("a KV chunk in the store is damaged and will be recomputed")
            self._drop(name)
        for host_block, position in whole.items():
            self.write_staging(task, host_block, blocks[position])
        missed = [host_block for host_block in host_blocks if host_block not in whole]
        self.report_fetch(task, [*whole], missed, [fetch.source] if missed else [])

    def _drop(self, name: str) -> None:
        """Remove a damaged object; if that fails, remember it as missing."""

        def drop() -> bool:
            self._connector.drop(name)
            return True

        if not self._call(False, drop):
            with self.changed:
                self._damaged[name] = None
                if len(self._damaged) > MAX_DAMAGED:
                    del self._damaged[next(iter(self._damaged))]

    def _store(self, store: Store, content: Bytes, blocks: Bytes, wait: Wait, task: Task) -> None:
        wait()
        self.format.finish(content, blocks, store.keys)
        name = self.format.name_of(store.keys[-1])
        is_stored = self._call(False, lambda: self._connector.put(name, content.data))
        self.report_store(task.tables_epoch, store.keys[-1], is_stored=is_stored)

    def _call(self, otherwise: ValueT, call: Callable[[], ValueT]) -> ValueT:
        """Return the connector's result; ``otherwise`` after an error, soon after one, or while a read hangs."""
        now_s = time.monotonic()
        with self.changed:
            is_hanging = any(
                now_s - begun_s > BACKOFF_S
                for task, begun_s in self.in_progress.items()
                if task.kind != "store"
            )
            if now_s < self._backoff_until_s or is_hanging:
                return otherwise
        try:
            return call()
        except Exception as error:  # noqa: BLE001 -- any error of a connector is a miss
            self._log_error(error)
            return otherwise

    def _log_error(self, error: Exception) -> None:
        """Log a store error, rate-limited. Its text may contain secrets, so only its type is logged."""
        errno = error.errno if isinstance(error, OSError) else None
        # strerror may be the storage's own text
        kind = os.strerror(errno) if errno is not None and errno in errorcode else None
        with self.changed:
            self._backoff_until_s = time.monotonic() + BACKOFF_S
            number = self._errors.count()
        if number:
            words = f"{type(error).__name__} ({kind})" if kind else type(error).__name__
            log.warning(
                "the KV store had %d errors, the last one %s: missing blocks are computed", number, words
            )


def open_store(
    blocks: WholeBlocks, host_blocks: range, store: KvStoreConfig, config: EngineConfig, runner: str
) -> StoreBackEnd:
    """See `quintet.executor.kv_transfer.connector.OpenBackEnd`."""
    identity = whole_of(parts_of(config, runner))
    log.info("KV in %s, as %s", store.url, identity.hex()[:32])
    return StoreBackEnd(blocks, host_blocks, open_connector(store), identity, store.waiting_bytes)
