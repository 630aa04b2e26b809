"""KV disk tier, the executor's half: stores blocks from KV memory, and fetches them to host staging blocks.

    loop        order: copies blocks out ──▶ [ stores ]                  [ results ] ──▶ core
    I/O thread                               [ fetches ] ──▶ files ──▶ staging ─┘ wakes the loop

Only the thread accesses the files, so no step waits for a disk. Fetches have priority, because requests wait for
them; this is safe, because the core fetches only blocks that are reported as stored. Stores beyond the queue limit
are dropped. The core decides on the placement of blocks (`quintet.core.kv.disk_pool`).

`open_kv_disk` opens the tier from the configuration.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, Wait, WholeBlocks, take
from quintet.executor.kv_transfer.disk.block_file import BlockFile
from quintet.executor.kv_transfer.disk.prefix_file import (
    PrefixFileError,
    read_keys,
    read_prefix,
    write_prefix,
)
from quintet.executor.kv_transfer.kv_identity import identity_of, parts_of, whole_of
from quintet.executor.memory import lazy_zeros
from quintet.process.os_tuning import set_batch_scheduling
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.kv_tiers import EXCHANGE, FileRequest, FileResult, KvTierRequests, KvTierResults

MAX_WAITING_BYTES = 256 << 20
"""Limit on block copies that wait for the disk."""
MAX_UNREPORTED = 64
"""Number of stored blocks before a report, while more are queued."""
MAX_UNREPORTED_FETCHES = 16
REPORT_AFTER_NS = 50_000_000
"""Number of fetched blocks, and fetch time, before a report while more are queued, so that requests can start early."""
CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True, frozen=True)
class _Store:
    tables: int
    place: int
    key: bytes
    block: Bytes
    wait: Wait
    """Waits until the block is copied."""


@dataclass(slots=True, frozen=True)
class _Drop:
    place: int
    key: bytes


@dataclass(slots=True, frozen=True)
class _Fetch:
    tables: int
    place: int
    key: bytes
    host_block: int


@dataclass(slots=True)
class _Job:
    """A long file operation, executed one block at a time when no other work is queued."""

    tables: int
    task_id: int
    steps: Iterator[int | bytes | tuple[int, bytes, bool]]
    """Yields the file's size so far, a key of the file, or place, key and success of an imported block."""
    answer: FileResult


class DiskBlocks:
    """See `quintet.executor.interface.KvDisk`."""

    def __init__(
        self,
        blocks: WholeBlocks,
        file: BlockFile,
        num_staging_blocks: int,
        first_host_block: int,
        exchange: Path,
        identity: Callable[[], bytes],
    ) -> None:
        """first_host_block: number of the first staging block.

        exchange: folder for exported prefixes. identity: returns the portable identity of the blocks.
        """
        self._exchange, self._identity = exchange, identity
        self._jobs: deque[_Job] = deque()
        self._blocks = blocks
        self._file = file
        self.num_places = file.num_places
        self.num_staging_blocks = num_staging_blocks
        self._first = first_host_block
        shape = (num_staging_blocks, file.block_bytes)
        self._staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._ring: Callable[[], None] = lambda: None
        self._stores: deque[_Store | _Drop] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._changed = threading.Condition()
        """Guards the fields below; never held during file access."""
        self._kept = dict(file.kept())
        """Place -> key, oldest write first, without places that are being written. The thread owns the files."""
        self._failure: Exception | None = None
        """Error that ended the thread."""
        self._tables = 0
        self._results = KvTierResults(0, 0)
        self._has_results = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)

    # --- the loop's side ---

    def begin(self, ring: Callable[[], None]) -> None:
        """See `KvTierWorker.begin`."""
        self._ring = ring
        self._thread.start()

    def order(self, orders: KvTierRequests) -> None:
        """See `KvTierWorker.order`."""
        tables = orders.tables
        stores = np.frombuffer(orders.stores, np.int32).reshape(-1, 2)
        num_free = MAX_WAITING_BYTES // self._file.block_bytes - len(self._stores)
        taken, wait = take(self._blocks, stores[: max(0, num_free), 0])
        fetches = np.frombuffer(orders.fetches, np.int32).reshape(-1, 2).tolist()
        with self._changed:
            if tables != self._tables:
                self._tables, self._results, self._has_results = tables, KvTierResults(0, tables), False
            for place, key in zip(
                np.frombuffer(orders.drops, np.int32).tolist(), orders.drop_keys, strict=True
            ):
                self._kept.pop(place, None)
                self._stores.append(_Drop(place, key))
            for place, key, block in zip(stores[:, 1].tolist(), orders.store_keys, taken, strict=False):
                self._stores.append(_Store(tables, place, key, block, wait))
            left = orders.store_keys[len(taken) :]
            if left:
                self._results.unstored.extend(left)
                self._report()
            for (place, block), key in zip(fetches, orders.fetch_keys, strict=True):
                self._fetches.append(_Fetch(tables, place, key, block))
            for each in orders.files:
                if each.verb == "import":
                    for place in unpack_i32(each.places):
                        self._kept.pop(place, None)
                self._jobs.append(_Job(tables, each.task_id, self._steps(each), FileResult(each.task_id)))
            self._changed.notify()

    def copy_in(self, blocks: Int, host_blocks: Int) -> None:
        """See `KvTierWorker.copy_in`."""
        self._blocks.put(blocks, self._staging[host_blocks - self._first])

    def take_results(self) -> KvTierResults | None:
        """See `KvTierWorker.take_results`."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("the KV disk thread failed") from self._failure
            if not self._has_results:
                return None
            results, self._results = self._results, KvTierResults(0, self._tables)
            self._has_results = False
        return results

    def kept(self) -> list[tuple[int, bytes]]:
        """See `KvDisk.kept`."""
        with self._changed:
            return list(self._kept.items())

    def reset(self) -> None:
        """See `KvTierWorker.reset`."""
        with self._changed:
            self._stores = deque(task for task in self._stores if isinstance(task, _Drop))
            self._fetches.clear()
            self._results, self._has_results = KvTierResults(0, self._tables), False

    def close(self) -> None:
        """See `KvTierWorker.close`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._file.close()

    # --- the thread's side ---

    def _work(self) -> None:
        """Execute queued tasks. Disk errors are reported as results; any other error is a bug and ends the loop too."""
        set_batch_scheduling()
        try:
            while (task := self._next()) is not None:
                if isinstance(task, _Store):
                    self._store(task)
                elif isinstance(task, _Drop):
                    self._file.drop(task.place, task.key)
                elif isinstance(task, _Job):
                    self._step_job(task)
                else:
                    self._fetch(task)
        except Exception as failure:  # noqa: BLE001 -- the loop raises it
            with self._changed:
                self._failure = failure
            self._ring()

    def _next(self) -> _Store | _Drop | _Fetch | _Job | None:
        """Block until a task is available and return it; None at close when all stores are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._fetches or self._stores or self._jobs or self._is_closing)
            if self._fetches:
                return self._fetches.popleft()
            if self._stores:
                return self._stores.popleft()
            return self._jobs[0] if self._jobs and not self._is_closing else None

    def _steps(self, order: FileRequest) -> Iterator[int | bytes | tuple[int, bytes, bool]]:
        folder, name, identity = self._exchange, order.name, self._identity()
        wanted = list(zip(unpack_i32(order.places), order.keys, strict=True))
        if order.verb == "export":
            yield from write_prefix(folder, name, identity, self._file, wanted)
        elif order.verb == "import":
            yield from read_prefix(folder, name, identity, self._file, wanted)
        else:
            yield from read_keys(folder, name, identity, self._file)

    def _step_job(self, job: _Job) -> None:
        """Execute the next step of a job and report its end. A job of earlier tables is dropped."""
        answer, step = job.answer, None
        if job.tables == self._tables:
            try:
                step = next(job.steps, None)
            except PrefixFileError as error:
                answer.error = str(error)
        with self._changed:
            results = self._results
            if step is None:
                self._jobs.popleft()
                if job.tables == self._tables:
                    results.files.append(answer)
                    self._report()
            elif isinstance(step, int):
                answer.num_bytes = step
            elif isinstance(step, bytes):
                answer.keys.append(step)
            else:
                self._note_imported(job, *step)

    def _note_imported(self, job: _Job, place: int, key: bytes, is_stored: bool) -> None:
        if is_stored:
            self._kept[place] = key
        else:
            job.answer.keys.append(key)
        if job.tables == self._tables:
            results = self._results
            (results.stored if is_stored else results.unstored).append(key)
            if len(results.stored) + len(results.unstored) >= MAX_UNREPORTED:
                self._report()

    def _store(self, task: _Store) -> None:
        with self._changed:
            self._kept.pop(task.place, None)
        task.wait()
        is_stored = self._file.write(task.place, task.key, task.block.data)
        with self._changed:
            if is_stored:
                self._kept[task.place] = task.key
            results = self._results
            if task.tables == self._tables:
                (results.stored if is_stored else results.unstored).append(task.key)
            if not self._stores or len(results.stored) + len(results.unstored) >= MAX_UNREPORTED:
                self._report()

    def _fetch(self, task: _Fetch) -> None:
        started = time.monotonic_ns()
        into = self._staging[task.host_block - self._first].data
        is_found = self._file.read(task.place, task.key, into)
        took_ns = time.monotonic_ns() - started
        with self._changed:
            results, block = self._results, pack_i32([task.host_block])
            if self._kept.get(task.place) == task.key and not self._file.holds(task.place, task.key):
                del self._kept[task.place]
            if task.tables == self._tables:
                results.fetch_ns += took_ns
                if is_found:
                    results.fetched += block
                else:
                    results.missed += block
            num_unreported = (len(results.fetched) + len(results.missed)) // 4
            if (
                not self._fetches
                or num_unreported >= MAX_UNREPORTED_FETCHES
                or results.fetch_ns >= REPORT_AFTER_NS
            ):
                self._report()

    def _report(self) -> None:
        if not self._has_results:
            self._has_results = True
            self._ring()


log = logging.getLogger(__name__)


def open_kv_disk(blocks: WholeBlocks, config: EngineConfig, runner: str, first_host_block: int) -> DiskBlocks:
    """Return the disk tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the files cannot be opened.
    """
    disk = config.cache.disk
    assert disk is not None, "no disk tier is configured"
    num_blocks = config.model.kv.num_blocks
    folder = Path(disk.folder)
    file = BlockFile(folder, identity_of(config, runner), blocks.block_bytes, num_blocks(disk.size_bytes))
    log.info("KV on disk: %d of %d blocks in %s", len(file.kept()), file.num_places, folder)
    return DiskBlocks(
        blocks,
        file,
        num_blocks(disk.staging_bytes),
        first_host_block,
        folder.parent / EXCHANGE,
        cache(lambda: whole_of(parts_of(config, runner))),
    )
