"""Private zeroed memory on huge pages, made ready by several threads while the program goes on.

    |#################################|- - - - - - - - - - - - - -|
     ready: huge, and there            reserved: whoever writes there first waits for a page

Where a hypervisor gives memory when it is first touched, a gigabyte takes two seconds, of small pages and of huge ones alike;
where all of it is there, zeroing takes a tenth of one. Several threads are that much faster at either. Only where free memory is
so scattered that the system moves others' pages to make room for a huge one, or finds none, is it better to begin with small
ones: it counts how often that was so (where it does not, whatever is slow counts as scattered).

Imports no torch: memory for weights is made ready while torch is being imported
(`quintet.executor.checkpoints.weights.read_ahead`).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

from quintet.executor.backends.platforms.cores import usable_cores
from quintet.executor.backends.platforms.memory_nodes import interleave, usable_nodes

PAGE_BYTES = 2 << 20
PIECE_BYTES = 8 * PAGE_BYTES
"""Taken by a thread at a time, between two looks at how it went."""
MAX_THREADS = 16
"""More do not zero faster: by then memory is what is waited for."""
SLACK_S = 0.03
"""How much longer than it should a thread may need before that counts as slow. What others have of the processor is not
counted: small pages would wait for it as well."""
BYTES_PER_S = 1.5e9
"""Slower than a thread makes huge pages where there are some: 2 to 12e9 measured."""
PAGES_PER_STALL, LEAST_STALLS = 8, 16
"""Room is hard to find if the system had to make some, or found none, for one in so many pages, and so often at least: others'
are counted with ours."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNTS = Path("/proc/vmstat")


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
        self._threads: list[threading.Thread] = []
        self._begun: tuple[int, int, int] | None = None
        self._may_be_huge = _are_allowed(switch)
        nodes = usable_nodes()
        if len(nodes) > 1:
            interleave(self._address, self.length, nodes)
        if self._may_be_huge:
            self.map.madvise(mmap.MADV_HUGEPAGE, self.offset, self.length)

    @property
    def ready(self) -> int:
        """Where pages begin that may become huge later, once nothing is being made ready; where none may, behind the last."""
        return self._taken if self.is_scattered else self.length

    def begin(self, until: int, num_threads: int) -> None:
        """Have threads make the first ``until`` bytes ready, in order, and return. They stop where memory is scattered."""
        if not self._may_be_huge:
            return
        stalls = _stalls()
        with self._lock:
            self._until = 0 if self.is_scattered else min(in_pages(until), self.length)
            pieces = -(-(self._until - self._taken) // PIECE_BYTES)
            self._begun = None if stalls is None else (*stalls, self._taken)
        for _ in range(min(num_threads, pieces)):
            thread = threading.Thread(target=self._make_ready, name="huge-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads for this user: `finish` does it alone
                return
            self._threads.append(thread)

    def finish(self) -> None:
        """Take part in what was begun; return when it is ready. What is scattered has small pages from then on."""
        self._make_ready()
        self._join()
        if self.is_scattered and self._taken < self.length:
            rest = self.length - self._taken
            self.map.madvise(mmap.MADV_NOHUGEPAGE, self.offset + self._taken, rest)

    def shrink(self, size_bytes: int) -> None:
        """Give back all but the first ``size_bytes``; with 0, all. Nobody may look at it yet."""
        with self._lock:
            self._until = 0  # nobody takes another piece
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
        begun, mine = time.thread_time(), 0
        while piece := self._take():
            # Not MADV_POPULATE_WRITE, which keeps the lock of all of the process's mappings, for which imports wait; nor a byte
            # of each page, which would be one of a small page where there is no huge one. One call: imports have Python's lock.
            ctypes.memset(self._address + piece.start, 0, len(piece))
            mine += len(piece)
            if self._is_hard(time.thread_time() - begun > SLACK_S + mine / BYTES_PER_S):
                with self._lock:
                    self.is_scattered, self._until = True, 0

    def _take(self) -> range:
        """Return which bytes the caller makes ready next; none where nothing is left."""
        with self._lock:
            begin, self._taken = self._taken, max(self._taken, min(self._taken + PIECE_BYTES, self._until))
            return range(begin, self._taken)

    def _is_hard(self, is_slow: bool) -> bool:
        """Whether room is hard to find: it was made, which is slow, or there was none, which need not be."""
        now = _stalls()
        if now is None or self._begun is None:
            return is_slow
        made, none, taken = (a - b for a, b in zip((*now, self._taken), self._begun, strict=True))
        stalls = made * is_slow + none
        return stalls >= LEAST_STALLS and stalls * PAGES_PER_STALL * PAGE_BYTES > taken


def in_pages(size_bytes: int) -> int:
    """Return the size in whole huge pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def spare_threads() -> int:
    """Return how many threads besides the caller should make memory ready."""
    return min(usable_cores(), MAX_THREADS) - 1


def _stalls() -> tuple[int, int] | None:
    """Return how often the system has made room for a huge page so far, and how often it found none; None: it does not say."""
    try:
        counts = dict(line.split() for line in COUNTS.read_text().splitlines())
        return int(counts["compact_stall"]), int(counts["thp_fault_fallback"])
    except (OSError, ValueError, KeyError):
        return None


def _are_allowed(switch: Path) -> bool:
    """Whether the system has huge pages and lets programs ask for them."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False
