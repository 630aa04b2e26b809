"""Zeroed memory on huge pages as a tensor.

    |#################################|- - - - - - - - - - - - - -|
     huge pages at reservation         small pages: `gather` collapses them while the process is idle

Every step reads all weights of a model. With 4 KiB pages, 1 GB needs about 250 000 TLB entries, and prefetchers stop at each
page end. With fragmented memory, however, the kernel takes milliseconds to allocate a 2 MiB page, which would delay startup.

On a NUMA machine the pages are interleaved over the nodes in use (`quintet.executor.backends.platforms.cores`).
`quintet.executor.backends.cpu.ops.huge_memory` populates the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Sequence

import torch

from quintet.executor.backends.cpu.ops.huge_memory import PAGE_BYTES, HugeMemory, spare_threads

MADV_COLLAPSE = 25
"""Since Linux 6.1; Python's mmap does not define it."""

IDLE_TASK_S = 0.003
"""Target duration of an idle task in seconds: about 1/20 of a step."""


class HugePages:
    """One reservation; the tensor keeps its memory alive."""

    def __init__(self, size_bytes: int, reserved: HugeMemory | None = None) -> None:
        """Use ``reserved``, of at least ``size_bytes``, or reserve memory; return when it is populated."""
        own = HugeMemory(size_bytes) if reserved is None else reserved
        own.begin(size_bytes, spare_threads())
        own.finish()
        self._map, self._begin, self._length = own.map, own.offset, own.length
        whole = torch.frombuffer(own.map, dtype=torch.uint8)
        self.memory = whole[own.offset : own.offset + size_bytes]
        """uint8 ``[size_bytes]``, zeros, aligned to a huge page."""
        self._gathered = own.ready

    @property
    def is_fragmented(self) -> bool:
        """True if small pages are left for `gather`."""
        return self._gathered < self._length

    def gather(self, seconds: float) -> None:
        """Collapse small pages into huge ones for about ``seconds``; a page that fails stays small.

        Call it only while no kernel runs: a read of a moving page blocks.
        """
        deadline = time.perf_counter() + seconds
        while self.is_fragmented:
            begin, self._gathered = self._begin + self._gathered, self._gathered + PAGE_BYTES
            with contextlib.suppress(OSError):  # no free huge page, an untouched page, or an older kernel
                self._map.madvise(mmap.MADV_HUGEPAGE, begin, PAGE_BYTES)  # which `HugeMemory.finish` forbade
                self._map.madvise(MADV_COLLAPSE, begin, PAGE_BYTES)
            if time.perf_counter() > deadline:
                break


def has_small_pages(memories: Sequence[HugePages]) -> bool:
    """Return whether small pages are left for `gather_some`."""
    return any(memory.is_fragmented for memory in memories)


def gather_some(memories: Sequence[HugePages]) -> None:
    """Run one idle task: collapse small pages, if there are any."""
    for memory in memories:
        if memory.is_fragmented:
            memory.gather(IDLE_TASK_S)
