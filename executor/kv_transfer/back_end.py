"""Device half of a KV back end: transfers between KV memory and storage, in background threads.

    loop        order: copies blocks out ──▶ [ stores ]                      [ results ] ──▶ core
    threads                  [ searches ] [ fetches ] ──▶ back end ──▶ staging ─┘ wakes the loop

Only the threads use the storage, so no step waits for it. `BackEnd` owns staging memory, results and failures.
`QueuedBackEnd` adds the queues and their threads; a subclass executes one task at a time. Storage errors are results;
any other error is a bug and ends the executor's loop too.

Results belong to one version of the executor's tables; results of earlier ones are dropped. The core decides what is
stored and fetched (`quintet.core.kv.tier`).
"""

from __future__ import annotations

import threading
import time
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
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, TierCapacity, TierName

CLOSE_TIMEOUT_S = 2.0
REPORT_AFTER_NS = 50_000_000
"""Fetch time before a report, so that requests can start early."""


class BackEnd:
    """Staging memory, results and threads of a back end. The loop calls the methods; threads call those marked so."""

    tier: ClassVar[TierName]
    close_timeout_s: ClassVar[float] = CLOSE_TIMEOUT_S

    def __init__(self, blocks: WholeBlocks, num_staging_blocks: int, first_host_block: int) -> None:
        """first_host_block: number of the first staging block."""
        self.blocks = blocks
        self.first = first_host_block
        shape = (num_staging_blocks, blocks.block_bytes)
        self.staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        """Fetched blocks, until a plan copies them in."""
        self.changed = threading.Condition()
        """Guards the fields below; never held during transfers."""
        self.tables = 0
        self.results = KvTierResults(0, 0, self.tier)
        self.is_closing = False
        self._has_results = False
        self._failure: Exception | None = None
        """Error that ended a thread."""
        self._ring: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []

    @property
    def capacity(self) -> TierCapacity:
        """Size of the back end."""
        return TierCapacity(self.tier, len(self.staging))

    def stored(self) -> list[tuple[int, bytes]]:
        """Return place and key of every stored block, oldest write first, if the core must know them."""
        return []

    def begin(self, ring: Callable[[], None]) -> None:
        """Start to accept requests. ring: wakes the loop, from another thread, when results are available."""
        self._ring = ring
        for thread in self._threads:
            thread.start()

    def order(self, requests: KvTierRequests) -> None:
        """Copy the blocks to store out of KV memory now; do the rest later."""
        raise NotImplementedError

    def copy_in(self, blocks: Int, host_blocks: Int) -> None:
        """Copy fetched data from these host blocks into blocks of KV memory."""
        self.blocks.put(blocks, self.staging[host_blocks - self.first])

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
            self.tables += 1  # results in progress become void; the next requests contain this number
            self._clear_results()
            self.cancel()
        self.wake()

    def close(self) -> None:
        """Finish accepted requests within the shutdown limit, then close files and sockets."""
        with self.changed:
            self.is_closing = True
        self.wake()
        until_s = time.monotonic() + self.close_timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.close_storage()

    # --- for subclasses ---

    def add_thread(self, run: Callable[[], None], name: str) -> None:
        """Add a thread that runs until the back end closes."""
        self._threads.append(threading.Thread(target=partial(self._guard, run), name=name, daemon=True))

    def _guard(self, run: Callable[[], None]) -> None:
        set_batch_scheduling()
        try:
            run()
        except Exception as failure:  # noqa: BLE001 -- the loop raises it
            with self.changed:
                self._failure = failure
            self._ring()

    def follow(self, tables: int) -> bool:
        """Return whether requests are the first ones of these tables; then drop older results. Needs the lock."""
        if tables == self.tables:
            return False
        self.tables = tables
        self._clear_results()
        return True

    def _clear_results(self) -> None:
        self.results, self._has_results = KvTierResults(0, self.tables, self.tier), False

    def report(self) -> None:
        """Wake the loop to take the results, from a thread. Needs the lock."""
        if not self._has_results:
            self._has_results = True
            self._ring()

    def cancel(self) -> None:
        """Cancel lookups and fetches. Needs the lock."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wake the threads."""
        raise NotImplementedError

    def close_storage(self) -> None:
        """Close files and sockets, after the threads have ended."""


@dataclass(slots=True, frozen=True, eq=False)
class Task:
    """Work for a thread."""

    kind: Literal["search", "fetch", "store", "idle"]
    tables: int
    run: Callable[[Task], None]
    """Called in a thread, without the lock."""
    num_bytes: int = 0
    """Host memory that the task holds."""


class QueuedBackEnd(BackEnd):
    """Back end with a queue per kind of task. Priority: searches, fetches, stores, idle tasks."""

    num_threads: ClassVar[int] = 1
    max_storing: ClassVar[int] = 1
    """Threads that may store at the same time."""
    max_unreported: ClassVar[dict[str, int]] = {"fetch": 1, "store": 1}
    """Number of fetched blocks and stored objects before a report, while more are queued."""

    def __init__(self, blocks: WholeBlocks, num_staging_blocks: int, first_host_block: int) -> None:
        """See `BackEnd`."""
        super().__init__(blocks, num_staging_blocks, first_host_block)
        self.queues: dict[str, deque[Task]] = {kind: deque() for kind in ("search", "fetch", "store", "idle")}
        self.in_progress: dict[Task, float] = {}
        """Tasks in progress, with their start times in seconds."""
        self._fetching_since_ns: int | None = None
        """Start of the uncounted time with any fetch in progress; None without one."""
        for number in range(self.num_threads):
            self.add_thread(self._work, f"kv-{self.tier}-{number}")

    def order(self, requests: KvTierRequests) -> None:
        """See `BackEnd.order`."""
        tasks = list(self.store_tasks(requests))
        with self.changed:
            if self.follow(requests.tables):
                self.trim_stores()
            for task in (*tasks, *self.tasks(requests)):
                self.queues[task.kind].append(task)
            self.changed.notify_all()

    def store_tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """Copy the blocks to store out of KV memory, and return their tasks."""
        raise NotImplementedError

    def tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """Return the other tasks. Needs the lock."""
        raise NotImplementedError

    def trim_stores(self) -> None:
        """Limit the stores left from an earlier core. Needs the lock."""

    def cancel(self) -> None:
        """See `BackEnd.cancel`."""
        self.queues["search"].clear()
        self.queues["fetch"].clear()

    def wake(self) -> None:
        """See `BackEnd.wake`."""
        with self.changed:
            self.changed.notify_all()

    # --- the threads' side ---

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task.run(task)
            with self.changed:
                self._end(task)
                if task.kind == "store":  # a waiting thread may store now, or end
                    self.changed.notify_all()

    def _next(self) -> Task | None:
        """Block until a task is available and return it; None at close when all stores are done."""
        with self.changed:
            while True:
                for kind in ("search", "fetch", "store", "idle"):
                    queue = self.queues[kind]
                    if not queue or (kind == "store" and self._count("store") >= self.max_storing):
                        continue
                    if self.is_closing and kind != "store":
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

    def _end(self, task: Task) -> None:
        if self.in_progress.pop(task, None) is None or task.kind != "fetch":
            return
        self._fetching_since_ns = time.monotonic_ns() if self._count("fetch") else None

    def end_fetch(
        self, task: Task, fetched: Sequence[int], missed: Sequence[int], lost: Sequence[bytes] = ()
    ) -> None:
        """Report host blocks that were filled, or not. lost: names of absent or damaged objects."""
        with self.changed:
            since_ns, results = self._fetching_since_ns, self.results
            self._end(task)
            if task.tables != self.tables:
                return
            if fetched and since_ns is not None:  # misses would distort the measured time
                results.num_fetches += 1
                results.fetch_ns += time.monotonic_ns() - since_ns
            results.fetched += pack_i32(fetched)
            results.missed += pack_i32(missed)
            results.lost += lost
            num_unreported = (len(results.fetched) + len(results.missed)) // 4
            self._report_if("fetch", num_unreported)

    def end_store(self, task: Task, name: bytes, *, is_stored: bool) -> None:
        """Report an object as stored or not."""
        with self.changed:
            results = self.results
            if task.tables == self.tables:
                (results.stored if is_stored else results.unstored).append(name)
                self._report_if("store", len(results.stored) + len(results.unstored))

    def _report_if(self, kind: str, num_unreported: int) -> None:
        is_late = kind == "fetch" and self.results.fetch_ns >= REPORT_AFTER_NS
        if is_late or not self.queues[kind] or num_unreported >= self.max_unreported[kind]:
            self.report()


def copy_out(blocks: WholeBlocks, numbers: Int, into: Bytes) -> Wait:
    """Copy blocks of KV memory to the rows of ``into``; return a function that waits for the copies."""
    return blocks.take_into(numbers, into, np.arange(len(numbers), dtype=np.int32))
