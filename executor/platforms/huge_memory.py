"""Private zeroed memory on huge pages, made ready by several threads while the program goes on.

    |#################################|- - - - - - - - - - - - - -|
     ready: huge, and there            reserved: whoever writes there first waits for a page

Where a hypervisor gives memory when it is first touched, a gigabyte takes two seconds, of small pages and of huge ones alike;
where all of it is there, zeroing takes a tenth of one. Threads share either. Only where free memory is so scattered that the
system moves others' pages to make room for a huge one is it better to begin with small ones: it counts how often it had to.

Imports no torch: memory for weights is made ready while torch is being imported (`quintet.executor.weights.read_ahead`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

from quintet.executor.platforms.memory_nodes import interleave, usable_nodes

PAGE_BYTES = 2 << 20
PIECE_BYTES = 8 * PAGE_BYTES
"""Taken by a thread at a time, between two looks at how long it needs."""
MAX_HELPERS = 15
SLACK_S = 0.03
"""How much longer than it should a thread may need before that counts as slow. What others have of the processor is not
counted: small pages would wait for it as well."""
BYTES_PER_S = 1.5e9
"""Slower than a thread makes huge pages where there are some: 2 to 12e9 measured."""
PAGES_PER_STALL = 8
"""Memory is scattered if it is slow and the system made room, or found none, for one in so many pages."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNTS = Path("/proc/vmstat")
STALLS = (b"compact_stall ", b"thp_fault_fallback ")


class HugeMemory:
    """One reservation of whole huge pages; zeros until somebody writes there."""

    def __init__(self, size_bytes: int, switch: Path = SWITCH) -> None:
        """Reserve it; `begin` has it made ready. switch: where the system says whether it has huge pages."""
        self.length = in_pages(size_bytes)
        # Private: memory that children would share, mmap's default, gets no huge pages whatever is asked for.
        self.map = mmap.mmap(-1, self.length + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.offset = -address % PAGE_BYTES
        """Of the first huge page in ``map``; what is before it is never touched."""
        self._address = address + self.offset
        self.is_scattered = False
        """Whether making room for the rest would take too long."""
        self._taken = self._until = 0
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._stalls = _stalls()
        self._may_be_huge = _are_allowed(switch)
        nodes = usable_nodes()
        if len(nodes) > 1:
            interleave(self._address, self.length, nodes)
        if self._may_be_huge:
            self.map.madvise(mmap.MADV_HUGEPAGE, self.offset, self.length)

    @property
    def ready(self) -> int:
        """How many bytes are ready, once nothing is being made so; where the system has no huge pages all count as such."""
        return self._taken if self.is_scattered else self.length

    def begin(self, until: int, num_helpers: int) -> None:
        """Have threads make the first ``until`` bytes ready, in order, and return. They stop where memory is scattered."""
        if not self._may_be_huge or self.is_scattered:
            return
        self._until = min(in_pages(until), self.length)
        pieces = -(-(self._until - self._taken) // PIECE_BYTES)
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        for _ in range(min(num_helpers, pieces) - len(self._helpers)):
            self._helpers.append(threading.Thread(target=self._make_ready, name="huge-memory", daemon=True))
            self._helpers[-1].start()

    def finish(self) -> None:
        """Help with what was begun; return when it is ready."""
        self._make_ready()
        self._join()
        if self.is_scattered and self._taken < self.length:
            rest = self.length - self._taken
            self.map.madvise(mmap.MADV_NOHUGEPAGE, self.offset + self._taken, rest)

    def shrink(self, size_bytes: int) -> None:
        """Give back all but the first ``size_bytes``; with 0, all. Nobody may look at it yet."""
        self._until = 0  # nobody takes another piece
        self._join()
        length = in_pages(size_bytes)
        if length == 0:
            self.map.close()
        elif length < self.length:
            self.map.resize(length + PAGE_BYTES)
        self.length, self._taken = min(self.length, length), min(self._taken, length)

    def _join(self) -> None:
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def _make_ready(self) -> None:
        begun, mine = time.thread_time(), 0
        while piece := self._take():
            for page in piece:
                # Not MADV_POPULATE_WRITE: that would keep the lock of all of the process's mappings, for which imports wait.
                ctypes.memset(self._address + page, 0, 1)
            mine += len(piece) * PAGE_BYTES
            if time.thread_time() - begun > SLACK_S + mine / BYTES_PER_S and self._makes_room():
                self.is_scattered = True
                self._until = 0

    def _take(self) -> range:
        """Return where the pages are that the caller makes ready next; nothing where there are none left."""
        with self._lock:
            begin, self._taken = self._taken, max(self._taken, min(self._taken + PIECE_BYTES, self._until))
            return range(begin, self._taken, PAGE_BYTES)

    def _makes_room(self) -> bool:
        return (_stalls() - self._stalls) * PAGES_PER_STALL * PAGE_BYTES > self._taken


def in_pages(size_bytes: int) -> int:
    """Return the size in whole huge pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def helpers() -> int:
    """Return how many threads besides the caller should make memory ready."""
    return min(len(os.sched_getaffinity(0)) - 1, MAX_HELPERS)


def _stalls() -> int:
    """Return how often the system has made room for a huge page so far, or found none."""
    try:
        lines = COUNTS.read_bytes().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(STALLS))


def _are_allowed(switch: Path) -> bool:
    """Whether the system has huge pages and lets programs ask for them."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False
