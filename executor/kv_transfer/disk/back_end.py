"""Disk back end, device half: blocks of KV memory in files of this engine.

One thread accesses the files; another computes the identity of exported prefixes. Fetches have priority, because requests wait
for them; this is safe, because the core fetches only blocks that are reported as stored. Stores beyond the queue limit are
dropped. The core decides which blocks the disk holds (`quintet.core.kv.disk_pool`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from quintet.executor.kv_transfer.back_end import BackEnd, Task, copy_out
from quintet.executor.kv_transfer.block_bytes import Bytes, Wait, WholeBlocks
from quintet.executor.kv_transfer.disk.block_file import BlockFile
from quintet.executor.kv_transfer.disk.prefix_file import (
    PrefixFileError,
    read_keys,
    read_prefix,
    write_prefix,
)
from quintet.executor.kv_transfer.kv_identity import identity_of, parts_of, whole_of
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig, KvDiskConfig
from quintet.wire.kv_tiers import EXCHANGE, FileRequest, FileResult, KvTierRequests, TierCapacity

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Limit on block copies that wait for the disk."""
MAX_UNREPORTED = {"fetch": 16, "store": 64}


class DiskBackEnd(BackEnd):
    """See `quintet.executor.kv_transfer.back_end`."""

    tier = "disk"
    max_unreported = MAX_UNREPORTED

    def __init__(
        self,
        blocks: WholeBlocks,
        host_blocks: range,
        file: BlockFile,
        exchange: Path,
        identity: Callable[[], bytes],
    ) -> None:
        """exchange: folder for exported prefixes. identity: computes the portable identity; may take long."""
        super().__init__(blocks, host_blocks)
        self._exchange, self._identity = exchange, identity
        self._file = file
        self._dropping: set[bytes] = set()
        """Keys to delete."""
        self._unidentified: list[tuple[int, FileRequest]] = []
        """File operations that wait for the identity, with their `tables_epoch`."""
        self.add_thread(self._identify, "kv-disk-identity")

    @property
    def capacity(self) -> TierCapacity:
        return TierCapacity("disk", len(self.host_blocks), self._file.num_places)

    def stored(self) -> list[bytes]:
        with self.changed:
            return [key for key in self._file.kept() if key not in self._dropping]

    def store_tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """See `BackEnd.store_tasks`. Blocks are deleted first."""
        for key in requests.drops:
            yield Task("store", requests.tables_epoch, partial(self._drop, key))
        for store in requests.stores:
            num_free = MAX_WAITING_BYTES // self._file.block_bytes - len(self.queues["store"])
            numbers = np.frombuffer(store.blocks, np.int32)[: max(0, num_free)]
            taken: Bytes = np.empty((len(numbers), self._file.block_bytes), np.uint8)
            wait = copy_out(self.blocks, numbers, taken)
            if len(taken) < len(store.keys):
                with self.changed:
                    self.results.unstored += store.keys[len(taken) :]
                    self.report()
            for key, block in zip(store.keys, taken, strict=False):
                run = partial(self._store, key, block, wait)
                yield Task("store", requests.tables_epoch, run, len(block))

    def tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        self._dropping.update(requests.drops)
        for fetch in requests.fetches:
            for host_block, key in zip(unpack_i32(fetch.host_blocks), fetch.keys, strict=True):
                yield Task("fetch", requests.tables_epoch, partial(self._fetch, host_block, key))
        self._unidentified += ((requests.tables_epoch, file) for file in requests.files)

    def cancel(self) -> None:
        """See `BackEnd.cancel`. Stores too: the core does not count them. Blocks are still deleted."""
        super().cancel()
        drops = [task for task in self.queues["store"] if not task.num_bytes]
        self.queues["store"].clear()
        self.queues["store"].extend(drops)

    def close_storage(self) -> None:
        self._file.close()

    # --- the thread's side ---

    def _drop(self, key: bytes, task: Task) -> None:
        self._file.drop(key)
        with self.changed:
            self._dropping.discard(key)

    def _store(self, key: bytes, block: Bytes, wait: Wait, task: Task) -> None:
        wait()
        self.report_store(task.tables_epoch, key, is_stored=self._file.write(key, block.data))

    def _fetch(self, host_block: int, key: bytes, task: Task) -> None:
        is_found = self._file.read(key, self.staging[host_block - self.host_blocks.start].data)
        self.report_fetch(task, [host_block] if is_found else [], [] if is_found else [host_block])

    def _identify(self) -> None:
        """Compute the identity before the first file operation, and queue the operations. Fetches do not wait for it."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._unidentified or self.is_closing)
                if self.is_closing:
                    return
            identity, error = b"", ""
            try:
                identity = self._identity()
            except OSError as failure:
                error = f"the weights cannot be read: {failure}"
            with self.changed:
                for epoch, file in self._unidentified:
                    result = FileResult(file.task_id, error)
                    steps: Iterator[bool] = iter(())
                    if not error:
                        steps = self._steps(file, identity, epoch, result)
                    self.queues["idle"].append(Task("idle", epoch, partial(self._step, steps, result)))
                self._unidentified.clear()
                self.changed.notify_all()

    def _steps(
        self, file: FileRequest, identity: bytes, tables_epoch: int, result: FileResult
    ) -> Iterator[bool]:
        """Execute a file operation and fill its result; yield True after each block, for tasks with priority."""
        folder, name = self._exchange, file.name
        if file.verb == "export":
            for num_bytes in write_prefix(folder, name, identity, self._file, file.keys):
                result.num_bytes = num_bytes
                yield True
        elif file.verb == "import":
            for key, is_stored in read_prefix(folder, name, identity, self._file, file.keys):
                self.report_store(tables_epoch, key, is_stored=is_stored)
                if not is_stored:
                    result.keys.append(key)
                yield True
        else:
            result.keys += read_keys(folder, name, identity, self._file)

    def _step(self, steps: Iterator[bool], result: FileResult, task: Task) -> None:
        """Execute the next step of a file operation, or report its end. Drop it if it belongs to earlier tables."""
        if task.tables_epoch != self.tables_epoch:
            return
        is_unfinished = False
        try:
            is_unfinished = next(steps, False)
        except PrefixFileError as error:
            result.error = str(error)
        with self.changed:
            if is_unfinished:
                self.queues["idle"].appendleft(task)
            elif task.tables_epoch == self.tables_epoch:
                self.results.files.append(result)
                self.report()


def open_disk(
    blocks: WholeBlocks, host_blocks: range, disk: KvDiskConfig, config: EngineConfig, runner: str
) -> DiskBackEnd:
    """See `quintet.executor.kv_transfer.connector.OpenBackEnd`."""
    folder, num_places = Path(disk.folder), config.model.kv.num_offloaded_blocks(disk.size_bytes)
    file = BlockFile(folder, identity_of(config, runner), blocks.block_bytes, num_places)
    log.info("KV on disk: %d of %d blocks in %s", len(file.kept()), num_places, folder)
    identity = cache(lambda: whole_of(parts_of(config, runner)))
    return DiskBackEnd(blocks, host_blocks, file, folder.parent / EXCHANGE, identity)
