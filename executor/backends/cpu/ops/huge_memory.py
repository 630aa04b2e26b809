"""Private zeroed memory on huge pages, populated by background threads.

    |#################################|- - - - - - - - - - - - - -|
     populated with huge pages         reserved: the first write faults a page in

Under a hypervisor that allocates memory on first touch, populating 1 GB takes about 2 s, with small or huge pages. With memory
already backed, zeroing takes about 0.1 s. Both scale with threads. If free memory is fragmented, the kernel compacts memory for
each huge page, or fails; small pages are then faster. The code detects fragmentation by the kernel's counters, or, without
counters, by the time spent.

Does not import torch: the memory of the weights is populated while torch is being imported
(`quintet.executor.checkpoints.weights.read_ahead`).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

from quintet.executor.backends.platforms.cores import interleave, usable_cores, usable_nodes

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 8 * PAGE_BYTES
"""Unit of work of a thread; it checks for fragmentation after each chunk."""
MAX_THREADS = 16
"""More threads do not help: memory bandwidth is the limit."""
SLACK_S = 0.03
"""CPU time of a thread above the expected time before it counts as slow. CPU time excludes time of other processes, which
would delay small pages as well."""
BYTES_PER_S = 1.5e9
"""Lower bound of a thread's rate with free huge pages; measured 2e9 to 12e9."""
PAGES_PER_STALL, MIN_STALLS = 8, 16
"""Memory counts as fragmented if 1 of ``PAGES_PER_STALL`` pages needed compaction or failed, and at least ``MIN_STALLS``
did. The kernel's counters include other processes."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNTS = Path("/proc/vmstat")


class HugeMemory:
    """One reservation of whole huge pages, initially zeros."""

    def __init__(self, size_bytes: int, switch: Path = SWITCH) -> None:
        """Reserve the memory; `begin` populates it. switch: file with the system's huge page setting."""
        self.length = in_pages(size_bytes)
        # Private: shared memory, mmap's default, gets no huge pages from madvise.
        self.map = mmap.mmap(-1, self.length + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.offset = -address % PAGE_BYTES
        """Offset of the first huge page in ``map``; the bytes before it are unused."""
        self._address = address + self.offset
        self.is_fragmented = False
        """True if memory is too fragmented to populate the rest with huge pages."""
        self._taken = self._until = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._initial: tuple[int, int, int] | None = None
        self._may_be_huge = _are_allowed(switch)
        nodes = usable_nodes()
        if len(nodes) > 1:
            interleave(self._address, self.length, nodes)
        if self._may_be_huge:
            self.map.madvise(mmap.MADV_HUGEPAGE, self.offset, self.length)

    @property
    def ready(self) -> int:
        """Offset of the first page left for `HugePages.gather`, once population has finished; the length if there is none."""
        return self._taken if self.is_fragmented else self.length

    def begin(self, until: int, num_threads: int) -> None:
        """Start threads that populate the first ``until`` bytes in order; they stop if memory is fragmented."""
        if not self._may_be_huge:
            return
        stalls = _stalls()
        with self._lock:
            self._until = 0 if self.is_fragmented else min(in_pages(until), self.length)
            chunks = -(-(self._until - self._taken) // CHUNK_BYTES)
            self._initial = None if stalls is None else (*stalls, self._taken)
        for _ in range(min(num_threads, chunks)):
            thread = threading.Thread(target=self._make_ready, name="huge-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # thread limit of the user: `finish` does the work alone
                return
            self._threads.append(thread)

    def finish(self) -> None:
        """Help to populate, and return when done. If memory is fragmented, the rest uses small pages."""
        self._make_ready()
        self._join()
        if self.is_fragmented and self._taken < self.length:
            rest = self.length - self._taken
            self.map.madvise(mmap.MADV_NOHUGEPAGE, self.offset + self._taken, rest)

    def shrink(self, size_bytes: int) -> None:
        """Free all but the first ``size_bytes`` (0: everything). No view of the memory may exist."""
        with self._lock:
            self._until = 0  # stop the threads after their current chunk
        self._join()
        length = in_pages(size_bytes)
        if length == 0:
            self.map.close()
        elif length < self.length:
            self.map.resize(length + PAGE_BYTES)
        self.length, self._taken = min(self.length, length), min(self._taken, length)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _make_ready(self) -> None:
        started, populated = time.thread_time(), 0
        while chunk := self._take():
            # MADV_POPULATE_WRITE would hold the process's mmap lock and block imports. Writing one byte per huge page would
            # miss pages that fall back to small ones. memset is one call and releases the GIL for imports.
            ctypes.memset(self._address + chunk.start, 0, len(chunk))
            populated += len(chunk)
            if self._is_fragmented(time.thread_time() - started > SLACK_S + populated / BYTES_PER_S):
                with self._lock:
                    self.is_fragmented, self._until = True, 0

    def _take(self) -> range:
        """Return the byte range that the caller populates next; empty if none is left."""
        with self._lock:
            begin, self._taken = self._taken, max(self._taken, min(self._taken + CHUNK_BYTES, self._until))
            return range(begin, self._taken)

    def _is_fragmented(self, is_slow: bool) -> bool:
        """Return whether huge pages are scarce: compaction was needed and slow, or allocation failed."""
        now = _stalls()
        if now is None or self._initial is None:
            return is_slow
        compacted, failed, taken = (a - b for a, b in zip((*now, self._taken), self._initial, strict=True))
        stalls = compacted * is_slow + failed
        return stalls >= MIN_STALLS and stalls * PAGES_PER_STALL * PAGE_BYTES > taken


def in_pages(size_bytes: int) -> int:
    """Return the size rounded up to whole huge pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def spare_threads() -> int:
    """Return the number of threads, besides the caller, for populating memory."""
    return min(usable_cores(), MAX_THREADS) - 1


def _stalls() -> tuple[int, int] | None:
    """Return the system's counts of compactions for huge pages and of failed allocations; None if unavailable."""
    try:
        counts = dict(line.split() for line in COUNTS.read_text().splitlines())
        return int(counts["compact_stall"]), int(counts["thp_fault_fallback"])
    except (OSError, ValueError, KeyError):
        return None


def _are_allowed(switch: Path) -> bool:
    """Return whether the system supports huge pages on request."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False
