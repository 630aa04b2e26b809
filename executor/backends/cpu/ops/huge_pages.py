"""Zeroed memory on huge pages as a tensor: at once, or where free memory is scattered bit by bit later.

    |#################################|- - - - - - - - - - - - - -|
     huge since the reservation        small at first: `gather` makes huge pages of them, while nobody waits

Every step reads all of a model's weights. With pages of 4 KiB the processor looks up half a million addresses for a gigabyte,
and its prefetchers stop at each page's end. But on a machine whose free memory is scattered, the system takes milliseconds to
make room for one page of 2 MiB, and whoever starts a server waits for the first token.

On a machine with several memory nodes the pages lie on those that compute, in turn (`executor.platforms.memory_nodes`).

Nothing here changes what the memory holds. Who makes it ready: `executor.ops.huge_memory`.
"""

from __future__ import annotations

import contextlib
import mmap
import time

import torch

from quintet.executor.backends.cpu.ops.huge_memory import PAGE_BYTES, HugeMemory, spare_threads

MADV_COLLAPSE = 25
"""Linux 6.1. Python's mmap has no name for it."""


class HugePages:
    """One reservation, whose memory the tensor keeps alive."""

    def __init__(self, size_bytes: int, reserved: HugeMemory | None = None) -> None:
        """Take ``reserved``, of at least so many bytes, or reserve them; return when they are ready."""
        own = HugeMemory(size_bytes) if reserved is None else reserved
        own.begin(size_bytes, spare_threads())
        own.finish()
        self._map, self._begin, self._length = own.map, own.offset, own.length
        whole = torch.frombuffer(own.map, dtype=torch.uint8)
        self.memory = whole[own.offset : own.offset + size_bytes]
        """uint8 ``[size_bytes]``, zeros, on a huge page's boundary."""
        self._gathered = own.ready

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
            begin, self._gathered = self._begin + self._gathered, self._gathered + PAGE_BYTES
            with contextlib.suppress(OSError):  # no room, nothing written there yet, or an older system
                self._map.madvise(mmap.MADV_HUGEPAGE, begin, PAGE_BYTES)  # which `HugeMemory.finish` forbade
                self._map.madvise(MADV_COLLAPSE, begin, PAGE_BYTES)
            if time.perf_counter() > deadline:
                break
