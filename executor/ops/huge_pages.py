"""Zeroed memory on huge pages: at once as far as the system has some ready, the rest bit by bit later.

    |#################################|- - - - - - - - - - - - - -|
     huge since the reservation        small at first: `gather` makes huge pages of them, while nobody waits

Every step reads all of a model's weights. With pages of 4 KiB the processor looks up half a million addresses for a gigabyte,
and its prefetchers stop at each page's end. But on a machine whose free memory is scattered, the system takes milliseconds to
make room for one page of 2 MiB, and whoever starts a server waits for the first token.

On a machine with several memory nodes the pages lie on those that compute, in turn (`executor.platforms.memory_nodes`).

Owns its mapping, which the tensor keeps alive. Nothing here changes what the memory holds.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path

import torch

from quintet.executor.platforms.memory_nodes import interleave, usable_nodes

PAGE_BYTES = 2 << 20
PIECE_BYTES = 8 * PAGE_BYTES
"""Populated between two looks at the clock."""
SLACK_S = 0.03
"""How much longer than it should a reservation may keep the processor before the rest is left for later. What others
have of it is not counted: small pages would wait for it as well."""
BYTES_PER_S = 1.5e9
"""Slower than huge pages are zeroed where there are some: 2 to 8e9 measured. Where room must be made first: 0.2 to 0.4e9."""

MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
"""Linux 5.14 and 6.1. Python's mmap has no names for them."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """One reservation."""

    def __init__(self, size_bytes: int, switch: Path = SWITCH) -> None:
        self._length = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        # Private: memory that children would share, mmap's default, gets no huge pages whatever is asked for.
        self._map = mmap.mmap(-1, self._length + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin = (
            -whole.data_ptr() % PAGE_BYTES
        )  # of the first huge page; what is before is never touched
        self.memory = whole[self._begin : self._begin + size_bytes]
        """uint8 ``[size_bytes]``, zeros, on a huge page's boundary."""
        nodes = usable_nodes()
        if len(nodes) > 1:
            interleave(whole.data_ptr() + self._begin, self._length, nodes)
        self._gathered = self._populate() if _are_allowed(switch) else self._length

    @property
    def is_scattered(self) -> bool:
        """Whether there is something left to `gather`."""
        return self._gathered < self._length

    def gather(self, seconds: float) -> None:
        """Make huge pages of small ones for about this long; one for which there is no room stays as it is.

        Nobody may be computing: who reads a page while it moves waits for it.
        """
        deadline = time.perf_counter() + seconds
        while self.is_scattered:
            begin, self._gathered = self._gathered, self._gathered + PAGE_BYTES
            with contextlib.suppress(OSError):  # no room, nothing written there yet, or an older system
                self._map.madvise(MADV_COLLAPSE, self._begin + begin, PAGE_BYTES)
            if time.perf_counter() > deadline:
                break

    def _populate(self) -> int:
        """Have pages zeroed, huge ones, while that goes fast. Return where they end."""
        begun, begin = time.thread_time(), 0
        while begin < self._length:
            piece = min(PIECE_BYTES, self._length - begin)
            self._map.madvise(mmap.MADV_HUGEPAGE, self._begin + begin, piece)
            try:
                self._map.madvise(MADV_POPULATE_WRITE, self._begin + begin, piece)
            except OSError:  # an older system: its first reader waits for each page
                self._map.madvise(mmap.MADV_HUGEPAGE)
                return self._length
            begin += piece
            if time.thread_time() - begun > SLACK_S + begin / BYTES_PER_S:
                break
        return begin


def _are_allowed(switch: Path) -> bool:
    """Whether the system has huge pages and lets programs ask for them."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False
