"""Device half of a KV back end: transfers between KV memory and storage, in background threads.

    loop        order: copies blocks out ──▶ [ stores ]                      [ results ] ──▶ core
    threads                  [ searches ] [ fetches ] ──▶ storage ──▶ staging ─┘ wakes the loop

Only the threads use the storage, so no step waits for it. A subclass executes one task at a time per thread. Storage
errors are results; any other error is a bug and ends the executor's loop too.

Results belong to one version of the executor's tables; results of earlier ones are dropped. The core decides what is
stored and fetched (`quintet.core.kv.tier`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, Wait, WholeBlocks
from quintet.executor.memory import lazy_zeros
from quintet.process.os_tuning import set_batch_scheduling
from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import Fetch, KvTierRequests, KvTierResults, Search, TierCapacity, TierName

PRIORITY = ("search", "fetch", "store", "idle")
REPORT_AFTER_NS = 50_000_000
"""Fetch time before a report, so that requests can start early."""


@dataclass(slots=True, frozen=True, eq=False)
class Task:
    """Work for a thread."""

    kind: Literal["search", "fetch", "store", "idle"]
    tables_epoch: int
    run: Callable[[Task], None]
    """Called in a thread, without the lock."""
    num_bytes: int = 0
    """Host memory that the task holds."""


class BackEnd(ABC):
    """Staging memory, queues, threads and results. Priority: searches, fetches, stores, idle tasks.

    Threads call `run_search`, `run_fetch`, the functions of tasks, and the methods after "the threads' side".
    """

    tier: ClassVar[TierName]
    num_threads: ClassVar[int] = 1
    max_storing: ClassVar[int] = 1
    """Threads that may store at the same time."""
    max_unreported: ClassVar[dict[str, int]] = {"fetch": 1, "store": 1}
    """Number of fetched blocks and stored objects before a report, while more are queued."""
    close_timeout_s: ClassVar[float] = 2.0

    def __init__(self, blocks: WholeBlocks, host_blocks: range) -> None:
        """host_blocks: numbers of the staging blocks."""
        self.blocks = blocks
        self.host_blocks = host_blocks
        shape = (len(host_blocks), blocks.block_bytes)
        self.staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        """Fetched blocks, until a plan copies them in."""
        self._staging_lock = threading.Lock()
        """Guards staging against late threads: they compare the tables before they write."""
        self.changed = threading.Condition()
        """Guards the fields below; never held during transfers."""
        self.tables_epoch = 0
        self.results = KvTierResults(0, 0, self.tier)
        self.queues: dict[str, deque[Task]] = {kind: deque() for kind in PRIORITY}
        self.in_progress: dict[Task, float] = {}
        """Tasks in progress, with their start times in seconds."""
        self.is_closing = False
        self._has_results = False
        self._fetching_since_ns: int | None = None
        """Start of the uncounted time with any fetch in progress; None without one."""
        self._failure: Exception | None = None
        """Error that ended a thread."""
        self._wake_loop: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []
        self._num_running = 0
        """Threads that have started and not ended."""
        for number in range(self.num_threads):
            self.add_thread(self._work, f"kv-{self.tier}-{number}")

    # --- implemented by back ends ---

    @property
    def capacity(self) -> TierCapacity:
        """Size of the back end."""
        return TierCapacity(self.tier, len(self.host_blocks))

    def stored(self) -> list[bytes]:
        """Return the key of every stored block, least recently used first, if the core must know them."""
        return []

    @abstractmethod
    def store_tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """Copy the blocks to store out of KV memory, and return their tasks."""

    def tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """Return the other tasks. Needs the lock."""
        for search in requests.searches:
            yield Task("search", requests.tables_epoch, partial(self.run_search, search))
        for fetch in requests.fetches:
            yield Task("fetch", requests.tables_epoch, partial(self.run_fetch, fetch))

    def run_search(self, search: Search, task: Task) -> None:
        """Count the objects that are present, and report."""
        raise NotImplementedError

    def run_fetch(self, fetch: Fetch, task: Task) -> None:
        """Read blocks into staging, and report each of them."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel queued searches and fetches after a reset of the tables. Needs the lock."""
        self.queues["search"].clear()
        self.queues["fetch"].clear()

    def close_storage(self) -> None:
        """Close files and sockets, after all threads have ended."""

    # --- the loop's side ---

    def begin(self, ring: Callable[[], None]) -> None:
        """Start to accept requests. ring: wakes the loop, from another thread, when results are available."""
        self._wake_loop, self._num_running = ring, len(self._threads)
        for thread in self._threads:
            thread.start()

    def order(self, requests: KvTierRequests) -> None:
        """Copy the blocks to store out of KV memory now; do the rest later. Requests are for the current tables."""
        stores = list(self.store_tasks(requests))
        with self.changed:
            for task in (*stores, *self.tasks(requests)):
                self.queues[task.kind].append(task)
            self.changed.notify_all()

    def copy_in(self, blocks: Int, host_blocks: Int) -> None:
        """Copy fetched data from these host blocks into blocks of KV memory."""
        self.blocks.put(blocks, self.staging[host_blocks - self.host_blocks.start])

    def take_results(self) -> KvTierResults | None:
        """Return the results since the last call, for the newest tables; None if there are none."""
        with self.changed:
            if self._failure is not None:
                raise RuntimeError(f"a KV {self.tier} thread failed") from self._failure
            if not self._has_results:
                return None
            results = self.results
            self._clear_results()
        return results

    def reset(self) -> None:
        """Cancel lookups and fetches after a reset of the tables."""
        with self.changed:
            self.tables_epoch += 1  # results in progress become void; the next requests contain this number
            self._clear_results()
            self.cancel()

    def close(self) -> None:
        """Finish accepted stores within the time limit, then close files and sockets. Later calls do nothing."""
        with self.changed:
            if self.is_closing:
                return
            self.is_closing = True
            is_idle = not self._num_running
            self.changed.notify_all()
            self.wake()
        if is_idle:
            self.close_storage()
        until_s = time.monotonic() + self.close_timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))

    def wake(self) -> None:
        """Wake a thread that waits for something else than a task, at close. Needs the lock."""

    def add_thread(self, run: Callable[[], None], name: str) -> None:
        """Add a thread that runs until the back end closes."""
        self._threads.append(threading.Thread(target=partial(self._guard, run), name=name, daemon=True))

    def _clear_results(self) -> None:
        self.results, self._has_results = KvTierResults(0, self.tables_epoch, self.tier), False

    # --- the threads' side ---

    def _guard(self, run: Callable[[], None]) -> None:
        set_batch_scheduling()
        try:
            run()
        except Exception as failure:  # noqa: BLE001 -- the loop raises it
            with self.changed:
                self._failure = failure
            self._wake_loop()
        with self.changed:
            self._num_running -= 1
            is_last = self.is_closing and not self._num_running
        if is_last:
            self.close_storage()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task.run(task)
            with self.changed:
                del self.in_progress[task]
                if task.kind == "fetch" and not self._count("fetch"):
                    self._fetching_since_ns = None
                if task.kind == "store":  # a waiting thread may store now, or end
                    self.changed.notify_all()

    def _next(self) -> Task | None:
        """Block until a task is available and return it; None at close when all stores are done."""
        with self.changed:
            while True:
                for kind in ("store",) if self.is_closing else PRIORITY:
                    queue = self.queues[kind]
                    if not queue or (kind == "store" and self._count("store") >= self.max_storing):
                        continue
                    task = queue.popleft()
                    self.in_progress[task] = time.monotonic()
                    if kind == "fetch" and self._fetching_since_ns is None:
                        self._fetching_since_ns = time.monotonic_ns()
                    return task
                if self.is_closing and not self.queues["store"]:
                    return None
                self.changed.wait()

    def _count(self, kind: str) -> int:
        return sum(task.kind == kind for task in self.in_progress)

    def is_void(self, task: Task) -> bool:
        """Return whether the result of a search or fetch is no longer needed."""
        return self.is_closing or task.tables_epoch != self.tables_epoch

    def write_staging(self, task: Task, host_block: int, content: memoryview | Bytes) -> None:
        """Fill a staging block."""
        with self._staging_lock:
            if task.tables_epoch == self.tables_epoch:
                self.staging[host_block - self.host_blocks.start] = np.frombuffer(content, np.uint8)

    def report_fetch(
        self, task: Task, fetched: Sequence[int], missed: Sequence[int], lost: Sequence[bytes] = ()
    ) -> None:
        """Report host blocks that were filled, or not. lost: names of absent or damaged objects."""
        with self.changed:
            since_ns, now_ns, results = self._fetching_since_ns, time.monotonic_ns(), self.results
            self._fetching_since_ns = now_ns
            if task.tables_epoch != self.tables_epoch:
                return
            if fetched and since_ns is not None:  # misses would distort the measured time
                results.num_fetches += 1
                results.fetch_ns += now_ns - since_ns
            results.fetched += pack_i32(fetched)
            results.missed += pack_i32(missed)
            results.lost += lost
            is_late = results.fetch_ns >= REPORT_AFTER_NS
            self._report_if("fetch", (len(results.fetched) + len(results.missed)) // 4, is_late=is_late)

    def report_store(self, tables_epoch: int, name: bytes, *, is_stored: bool) -> None:
        """Report an object as stored or not. tables_epoch: of the request."""
        with self.changed:
            results = self.results
            if tables_epoch == self.tables_epoch:
                (results.stored if is_stored else results.unstored).append(name)
                self._report_if("store", len(results.stored) + len(results.unstored))

    def _report_if(self, kind: str, num_unreported: int, *, is_late: bool = False) -> None:
        if is_late or not self.queues[kind] or num_unreported >= self.max_unreported[kind]:
            self.report()

    def report(self) -> None:
        """Wake the loop to take the results. Needs the lock."""
        if not self._has_results:
            self._has_results = True
            self._wake_loop()


def copy_out(blocks: WholeBlocks, numbers: Int, into: Bytes) -> Wait:
    """Copy blocks of KV memory to the rows of ``into``; return a function that waits for the copies."""
    return blocks.take_into(numbers, into, np.arange(len(numbers), dtype=np.int32))
