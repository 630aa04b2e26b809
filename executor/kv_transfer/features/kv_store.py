"""Shared KV store, the executor's half: puts chunks of blocks into a store, and gets them to host staging blocks.

    loop        order: copies blocks out ──▶ [ puts ]                          [ results ] ──▶ core
    threads                      [ searches ] [ gets ] ──▶ connector ──▶ staging ─┘ wakes the loop

Only the threads use the store, so no step waits for it. Priority: searches, gets, puts; puts never occupy all
threads. A connector's error is a result, and the store is not used for a while after it. A damaged object counts as a
miss. The core decides which chunks to look up and to put (`quintet.core.kv.store_pool`).

`open_kv_store` opens the tier from the configuration.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from errno import errorcode
from typing import TypeVar

import numpy as np
import torch

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, Wait, WholeBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.store.chunk_format import ChunkFormat
from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED, KvConnector, open_connector
from quintet.executor.memory import lazy_zeros
from quintet.process.os_tuning import set_batch_scheduling
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.kv_tiers import Get, KvTierRequests, KvTierResults, LookupResult, Put, Search, StoreResults

log = logging.getLogger(__name__)
ValueT = TypeVar("ValueT")

NUM_THREADS, NUM_PUTTERS = 8, 3
"""Number of threads; of these, threads that may execute puts."""
BACKOFF_S = 5.0
"""Time without requests to a store after an error, and the timeout that counts as an error."""
LOG_INTERVAL_S = 60.0
"""Minimum interval between log lines about errors."""
CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True, frozen=True)
class _Put:
    put: Put
    content: Bytes
    blocks: Bytes
    wait: Wait
    """Waits until the blocks are copied."""


@dataclass(slots=True, frozen=True, eq=False)
class _Task:
    tables: int
    order: Search | Get | _Put


class StoreBlocks:
    """See `quintet.executor.interface.KvTierWorker`."""

    def __init__(
        self,
        blocks: WholeBlocks,
        connector: KvConnector,
        identity: bytes,
        num_staging_blocks: int,
        first_host_block: int,
        waiting_bytes: int,
    ) -> None:
        """identity: the portable identity of the blocks.

        first_host_block: number of the first staging block. waiting_bytes: limit on a core's unfinished copies; the
        same amount may be left from earlier cores.
        """
        self._blocks = blocks
        self._format = ChunkFormat(identity, self._blocks.block_bytes)
        self._connector = connector
        self.num_staging_blocks = num_staging_blocks
        self._first = first_host_block
        shape = (num_staging_blocks, self._blocks.block_bytes)
        self._staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._staging_lock = threading.Lock()
        """Guards staging against late threads: they compare the table epoch before they write."""
        self._ring: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        """Guards the fields below; never held during store access."""
        self._searches: deque[_Task] = deque()
        self._gets: deque[_Task] = deque()
        self._puts: deque[_Task] = deque()
        self._waiting_bytes = waiting_bytes
        self._damaged: dict[str, None] = {}
        """Damaged objects, treated as missing; oldest first."""
        self._num_putting = 0
        self._in_progress: dict[_Task, float] = {}
        """Searches and gets in progress, with their start times."""
        self._getting_since_ns: int | None = None
        """Start of the uncounted time with any get in progress; None without one."""
        self._backoff_until_s = 0.0
        self._num_errors, self._quiet_until_s = 0, 0.0
        """Errors since the last log line, and the end of its interval."""
        self._failure: Exception | None = None
        """Error that ended a thread."""
        self._tables = 0
        self._results, self._has_results = StoreResults(), False
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-store-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]

    # --- the loop's side ---

    def begin(self, ring: Callable[[], None]) -> None:
        """See `KvTierWorker.begin`."""
        self._ring = ring
        for thread in self._threads:
            thread.start()

    def order(self, orders: KvTierRequests) -> None:
        """See `KvTierWorker.order`."""
        store, tables = orders.store, orders.tables
        if store is None:
            return
        puts = [_Task(tables, self._copy_out(put)) for put in store.puts]
        with self._changed:
            if tables != self._tables:
                self._tables, self._results, self._has_results = tables, StoreResults(), False
                self._trim_puts()
            self._searches += (_Task(tables, search) for search in store.searches)
            self._gets += (_Task(tables, get) for get in store.gets)
            self._puts += puts
            self._changed.notify_all()

    def _trim_puts(self) -> None:
        """Limit the copies left from an earlier core, because the new core counts only its own."""
        left, kept = self._waiting_bytes, deque[_Task]()
        for task in reversed(self._puts):
            assert isinstance(task.order, _Put)
            left -= len(task.order.content)
            if left < 0:
                break
            kept.appendleft(task)
        self._puts = kept

    def _copy_out(self, put: Put) -> _Put:
        content, blocks = self._format.new(len(put.keys))
        from_blocks = np.frombuffer(put.blocks, np.int32)
        wait = self._blocks.take_into(from_blocks, blocks, np.arange(len(blocks), dtype=np.int32))
        return _Put(put, content, blocks, wait)

    def copy_in(self, blocks: Int, host_blocks: Int) -> None:
        """See `KvTierWorker.copy_in`."""
        self._blocks.put(blocks, self._staging[host_blocks - self._first])

    def take_results(self) -> KvTierResults | None:
        """See `KvTierWorker.take_results`."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("a KV store thread failed") from self._failure
            if not self._has_results:
                return None
            results, self._results = self._results, StoreResults()
            self._has_results = False
            return KvTierResults(0, self._tables, store=results)

    def reset(self) -> None:
        """See `KvTierWorker.reset`."""
        with self._changed:
            self._searches.clear()
            self._gets.clear()
            self._tables += 1  # results in progress become void; the next orders contain their table epoch
            self._results, self._has_results = StoreResults(), False

    def close(self) -> None:
        """See `KvTierWorker.close`."""
        with self._changed:
            self._is_closing = True
            self._searches.clear()
            self._gets.clear()
            self._changed.notify_all()
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._connector.close()

    # --- the threads' side ---

    def _work(self) -> None:
        """Execute queued tasks. A connector's errors are results; any other error is a bug and ends the loop too."""
        set_batch_scheduling()
        try:
            while (task := self._next()) is not None:
                match task.order:
                    case Search():
                        self._search(task, task.order)
                    case Get():
                        self._get(task, task.order)
                    case _Put():
                        self._put(task, task.order)
        except Exception as failure:  # noqa: BLE001 -- the loop raises it
            with self._changed:
                self._failure = failure
            self._ring()

    def _next(self) -> _Task | None:
        """Block until a task is available and return it; None at close when all puts are done."""
        with self._changed:
            while True:
                if self._searches or self._gets:
                    task = (self._searches or self._gets).popleft()
                    self._in_progress[task] = time.monotonic()
                    if isinstance(task.order, Get) and self._getting_since_ns is None:
                        self._getting_since_ns = time.monotonic_ns()
                    return task
                if self._puts and self._num_putting < NUM_PUTTERS:
                    self._num_putting += 1
                    return self._puts.popleft()
                if self._is_closing and not self._puts:
                    return None
                self._changed.wait()

    def _search(self, task: _Task, search: Search) -> None:
        begun_ns = time.monotonic_ns()
        counts = [self._count([self._format.name_of(key) for key in chain]) for chain in search.chains]
        with self._changed:
            del self._in_progress[task]
            if task.tables == self._tables:
                self._results.found.append(
                    LookupResult(search.request_id, pack_i32(count or 0 for count in counts))
                )
                if None not in counts:  # failed lookups would distort the measured time
                    self._results.num_searches += 1
                    self._results.search_ns += time.monotonic_ns() - begun_ns
                self._report()

    def _count(self, names: list[str]) -> int | None:
        """Return the number of leading objects that exist; None if the store did not answer."""
        with self._changed:
            candidates = list(itertools.takewhile(lambda name: name not in self._damaged, names))
        return self._call(None, lambda: self._connector.count(candidates)) if candidates else 0

    def _get(self, task: _Task, get: Get) -> None:
        name, host_blocks = self._format.name_of(get.name), unpack_i32(get.host_blocks)
        content, blocks = self._format.new(get.num_blocks)
        is_there = self._call(False, lambda: self._connector.get(name, content.data))
        wanted = list(zip(unpack_i32(get.positions), host_blocks, get.keys, strict=True))
        whole = [
            (position, host_block)
            for position, host_block, key in wanted
            if is_there and self._format.is_block(content, blocks, position, key)
        ]
        is_damaged = is_there and len(whole) < len(wanted)
        if is_damaged:
            log.warning("a KV chunk in the store is damaged and will be recomputed")
            self._drop(name)
        with self._staging_lock:
            if task.tables == self._tables:
                for position, host_block in whole:
                    self._staging[host_block - self._first] = blocks[position]
        fetched = [host_block for _, host_block in whole]
        with self._changed:
            del self._in_progress[task]
            now_ns, since_ns = time.monotonic_ns(), self._getting_since_ns
            is_getting = any(isinstance(other.order, Get) for other in self._in_progress)
            self._getting_since_ns = now_ns if is_getting else None
            if task.tables != self._tables:
                return
            results = self._results
            if is_there and since_ns is not None:  # misses would distort the measured time
                results.num_gets += 1
                results.get_ns += now_ns - since_ns
            results.fetched += pack_i32(fetched)
            results.missed += pack_i32(block for block in host_blocks if block not in fetched)
            if len(whole) < len(wanted):
                results.lost.append(get.name)
            self._report()

    def _drop(self, name: str) -> None:
        """Remove a damaged object; if that fails, remember it as missing."""

        def drop() -> bool:
            self._connector.drop(name)
            return True

        if not self._call(False, drop):
            with self._changed:
                self._damaged[name] = None
                if len(self._damaged) > MAX_DAMAGED:
                    del self._damaged[next(iter(self._damaged))]

    def _put(self, task: _Task, put: _Put) -> None:
        put.wait()
        self._format.finish(put.content, put.blocks, put.put.keys)
        name = put.put.keys[-1]
        is_kept = self._call(False, lambda: self._connector.put(self._format.name_of(name), put.content.data))
        with self._changed:
            self._num_putting -= 1
            self._changed.notify_all()  # also wakes threads that wait for the last put at close
            if task.tables == self._tables:
                (self._results.kept if is_kept else self._results.unkept).append(name)
                self._report()

    def _call(self, otherwise: ValueT, call: Callable[[], ValueT]) -> ValueT:
        """Return the connector's result; ``otherwise`` after an error, soon after one, or while a request hangs."""
        now_s = time.monotonic()
        with self._changed:
            is_hanging = any(now_s - begun_s > BACKOFF_S for begun_s in self._in_progress.values())
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
        with self._changed:
            self._backoff_until_s = time.monotonic() + BACKOFF_S
            self._num_errors += 1
            if time.monotonic() < self._quiet_until_s:
                return
            number, self._num_errors = self._num_errors, 0
            self._quiet_until_s = time.monotonic() + LOG_INTERVAL_S
        log.warning(
            "the KV store had %d errors, the last one %s%s: missing blocks are computed",
            number, type(error).__name__, f" ({kind})" if kind else "",
        )  # fmt: skip

    def _report(self) -> None:
        if not self._has_results:
            self._has_results = True
            self._ring()


def open_kv_store(
    blocks: WholeBlocks, config: EngineConfig, runner: str, first_host_block: int
) -> StoreBlocks:
    """Return the store tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the store cannot be opened.
    """
    store = config.cache.store
    assert store is not None, "no store is configured"
    identity = whole_of(parts_of(config, runner))
    log.info("KV in %s, as %s", store.url, identity.hex()[:32])
    return StoreBlocks(
        blocks,
        open_connector(store),
        identity,
        config.model.kv.num_blocks(store.staging_bytes),
        first_host_block,
        store.waiting_bytes,
    )
