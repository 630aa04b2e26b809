"""KV that other servers share, the device's half: runs of blocks go to a store, and come from there to host memory.

    loop        order: copies blocks out ──▶ [ puts ]                          [ answers ] ──▶ core
    threads                      [ searches ] [ gets ] ──▶ connector ──▶ staging ─┘ rings

The loop does nothing with the store, so a step waits for none. Who waits comes first: searches, then gets, then puts, which never
have all threads. An error of the connector is an answer, and for a moment nobody asks it anything more; so is an object that is
not what was put. What is where, and what is worth it, is the core's to know (`quintet.core.kv.store_pool`).
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
from quintet.executor.kv_transfer.store.chunk_format import RunFormat
from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED, KvConnector
from quintet.executor.memory import lazy_zeros
from quintet.process.sched_batch import let_others_finish
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_disk import KvTierRequests, KvTierResults
from quintet.wire.kv_store import Get, LookupResult, Put, Search, StoreResults

log = logging.getLogger(__name__)
ValueT = TypeVar("ValueT")

NUM_THREADS, NUM_PUTTERS = 8, 3
"""Objects on their way at once; of these, on their way there."""
SHUN_S = 5.0
"""How long nobody asks a store that had an error, or that has not answered for so long."""
SILENCE_S = 60.0
"""Between two lines of the log about errors."""
FAREWELL_S = 2.0


@dataclass(slots=True, frozen=True)
class _Put:
    put: Put
    content: Bytes
    blocks: Bytes
    wait: Wait
    """Until the blocks are there."""


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
        whose: bytes,
        num_staging_blocks: int,
        first_host_block: int,
        waiting_bytes: int,
    ) -> None:
        """whose: as other machines can compare it.

        first_host_block: the number of the first one of staging. waiting_bytes: of copies that a core has had made and that are
        not kept yet; as much may be left of the cores before it.
        """
        self._blocks = blocks
        self._format = RunFormat(whose, self._blocks.block_bytes)
        self._connector = connector
        self.num_staging_blocks = num_staging_blocks
        self._first = first_host_block
        shape = (num_staging_blocks, self._blocks.block_bytes)
        self._staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._staging_lock = threading.Lock()
        """Guards staging against two threads of which one is late: it asks about the tables before it writes."""
        self._ring: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        """Guards all below; held for no longer than a look takes."""
        self._searches: deque[_Task] = deque()
        self._gets: deque[_Task] = deque()
        self._puts: deque[_Task] = deque()
        self._waiting_bytes = waiting_bytes
        self._damaged: dict[str, None] = {}
        """Objects that are taken not to be there, the one that was found first first."""
        self._num_putting = 0
        self._asking: dict[_Task, float] = {}
        """Searches and gets that were begun, and when."""
        self._getting_since_ns: int | None = None
        """Since when the time is not counted in which any get was on its way; None while none is."""
        self._shunned_until_s = 0.0
        self._num_errors, self._silent_until_s = 0, 0.0
        """Since that was last said."""
        self._failure: Exception | None = None
        """What ended a thread."""
        self._tables = 0
        self._answers, self._has_answers = StoreResults(), False
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-store-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]

    # --- the loop's side ---

    def begin(self, ring: Callable[[], None]) -> None:
        """See `KvElsewhere.begin`."""
        self._ring = ring
        for thread in self._threads:
            thread.start()

    def order(self, orders: KvTierRequests) -> None:
        """See `KvElsewhere.order`."""
        store, tables = orders.store, orders.tables
        if store is None:
            return
        puts = [_Task(tables, self._copy_out(put)) for put in store.puts]
        with self._changed:
            if tables != self._tables:
                self._tables, self._answers, self._has_answers = tables, StoreResults(), False
                self._let_go_of_puts()
            self._searches += (_Task(tables, search) for search in store.searches)
            self._gets += (_Task(tables, get) for get in store.gets)
            self._puts += puts
            self._changed.notify_all()

    def _let_go_of_puts(self) -> None:
        """Keep no more copies of an earlier core's than it might have had: the next has as many made, and counts only its own."""
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
        """Copy what was fetched into blocks of KV memory."""
        self._blocks.put(blocks, self._staging[host_blocks - self._first])

    def take_answers(self) -> KvTierResults | None:
        """See `KvElsewhere.take_answers`."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("a thread that talks with the store of KV has failed") from self._failure
            if not self._has_answers:
                return None
            answers, self._answers = self._answers, StoreResults()
            self._has_answers = False
            return KvTierResults(0, self._tables, store=answers)

    def reset(self) -> None:
        """See `KvElsewhere.reset`."""
        with self._changed:
            self._searches.clear()
            self._gets.clear()
            self._tables += (
                1  # what is on its way comes to nobody; the next orders name the tables that they are about
            )
            self._answers, self._has_answers = StoreResults(), False

    def close(self) -> None:
        """See `KvElsewhere.close`."""
        with self._changed:
            self._is_closing = True
            self._searches.clear()
            self._gets.clear()
            self._changed.notify_all()
        until_s = time.monotonic() + FAREWELL_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._connector.close()

    # --- the threads' side ---

    def _work(self) -> None:
        """Do what is ordered. A connector's errors are answers; anything else is our mistake, and the loop's end too."""
        let_others_finish()
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
        """Return what is to be done next, when there is something; None when all is done and nobody orders any more."""
        with self._changed:
            while True:
                if self._searches or self._gets:
                    task = (self._searches or self._gets).popleft()
                    self._asking[task] = time.monotonic()
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
            del self._asking[task]
            if task.tables == self._tables:
                self._answers.found.append(
                    LookupResult(search.request_id, pack_i32(count or 0 for count in counts))
                )
                if (
                    None not in counts
                ):  # what was not asked, or not answered, says nothing of how long it takes
                    self._answers.num_searches += 1
                    self._answers.search_ns += time.monotonic_ns() - begun_ns
                self._tell()

    def _count(self, names: list[str]) -> int | None:
        """Return how many of the first are there; None where nobody said."""
        with self._changed:
            believed = list(itertools.takewhile(lambda name: name not in self._damaged, names))
        return self._asked(None, lambda: self._connector.count(believed)) if believed else 0

    def _get(self, task: _Task, get: Get) -> None:
        name, host_blocks = self._format.name_of(get.name), unpack_i32(get.host_blocks)
        content, blocks = self._format.new(get.num_blocks)
        is_there = self._asked(False, lambda: self._connector.get(name, content.data))
        wanted = list(zip(unpack_i32(get.positions), host_blocks, get.keys, strict=True))
        whole = [
            (position, host_block)
            for position, host_block, key in wanted
            if is_there and self._format.is_block(content, blocks, position, key)
        ]
        is_damaged = is_there and len(whole) < len(wanted)
        if is_damaged:
            log.warning("a run of KV in the store is not what was put: it is computed again")
            self._drop(name)
        with self._staging_lock:
            if task.tables == self._tables:
                for position, host_block in whole:
                    self._staging[host_block - self._first] = blocks[position]
        fetched = [host_block for _, host_block in whole]
        with self._changed:
            del self._asking[task]
            now_ns, since_ns = time.monotonic_ns(), self._getting_since_ns
            is_getting = any(isinstance(other.order, Get) for other in self._asking)
            self._getting_since_ns = now_ns if is_getting else None
            if task.tables != self._tables:
                return
            answers = self._answers
            if (
                is_there and since_ns is not None
            ):  # what the store does not answer says nothing of how long it takes
                answers.num_gets += 1
                answers.get_ns += now_ns - since_ns
            answers.fetched += pack_i32(fetched)
            answers.missed += pack_i32(block for block in host_blocks if block not in fetched)
            if len(whole) < len(wanted):
                answers.lost.append(get.name)
            self._tell()

    def _drop(self, name: str) -> None:
        """Have a damaged object removed; where that cannot be, remember that it is none."""

        def drop() -> bool:
            self._connector.drop(name)
            return True

        if not self._asked(False, drop):
            with self._changed:
                self._damaged[name] = None
                if len(self._damaged) > MAX_DAMAGED:
                    del self._damaged[next(iter(self._damaged))]

    def _put(self, task: _Task, put: _Put) -> None:
        put.wait()
        self._format.finish(put.content, put.blocks, put.put.keys)
        name = put.put.keys[-1]
        is_kept = self._asked(
            False, lambda: self._connector.put(self._format.name_of(name), put.content.data)
        )
        with self._changed:
            self._num_putting -= 1
            self._changed.notify_all()  # at the end those, too, who wait for the last put
            if task.tables == self._tables:
                (self._answers.kept if is_kept else self._answers.unkept).append(name)
                self._tell()

    def _asked(self, otherwise: ValueT, question: Callable[[], ValueT]) -> ValueT:
        """Return what the connector says; ``otherwise`` where it has an error, had one a moment ago, or somebody waits long."""
        now_s = time.monotonic()
        with self._changed:
            is_hanging = any(now_s - begun_s > SHUN_S for begun_s in self._asking.values())
            if now_s < self._shunned_until_s or is_hanging:
                return otherwise
        try:
            return question()
        except Exception as error:  # noqa: BLE001 -- whatever a connector does wrong is a miss
            self._complain(error)
            return otherwise

    def _complain(self, error: Exception) -> None:
        """Say that the store had an error; not of each. Its words may hold secrets, so only its kind is said."""
        errno = error.errno if isinstance(error, OSError) else None
        # its own words for a number may be the storage's
        kind = os.strerror(errno) if errno is not None and errno in errorcode else None
        with self._changed:
            self._shunned_until_s = time.monotonic() + SHUN_S
            self._num_errors += 1
            if time.monotonic() < self._silent_until_s:
                return
            number, self._num_errors = self._num_errors, 0
            self._silent_until_s = time.monotonic() + SILENCE_S
        log.warning(
            "the store of KV had %d errors, the last one %s%s: what it does not have is computed",
            number, type(error).__name__, f" ({kind})" if kind else "",
        )  # fmt: skip

    def _tell(self) -> None:
        if not self._has_answers:
            self._has_answers = True
            self._ring()
