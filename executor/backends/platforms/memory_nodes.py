"""Memory of several nodes (NUMA): which nodes this process computes on, and memory that lies on all of them in turn.

Every step reads all weights with all threads, and which thread reads what is decided piece by piece. So weights are spread
page by page over the nodes whose processors compute: each node's memory gives its share of the bandwidth, whoever asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

SYSTEM = Path("/sys")
MPOL_INTERLEAVE = 3
MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call (Linux's mbind(2)), for which the C library has no function."""
MASK_BITS = 1024


def usable_nodes(affinity: set[int] | None = None, system: Path = SYSTEM) -> list[int]:
    """Return the nodes that have a processor of ``affinity``; empty where the system is silent.

    Default: the processors of all of this process's threads, since each of them may be kept on one.
    """
    allowed = _processors_of_threads() if affinity is None else affinity
    nodes = []
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        try:
            processors = _listed((folder / "cpulist").read_text())
        except OSError:
            continue
        if processors & allowed:
            nodes.append(int(folder.name.removeprefix("node")))
    return sorted(nodes)


def nodes_of(processors: Collection[int], system: Path = SYSTEM) -> dict[int, int]:
    """Return the node of each processor; nothing of those where the system is silent."""
    found = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            for processor in _listed((folder / "cpulist").read_text()).intersection(processors):
                found[processor] = int(folder.name.removeprefix("node"))
    return found


def interleave(address: int, size_bytes: int, nodes: list[int]) -> bool:
    """Have untouched pages of ``[address, address + size_bytes)``, whole pages, lie on ``nodes`` in turn.

    Return whether the system will; otherwise pages lie where they are first touched, and the log says why.
    """
    number = MBIND.get(platform.machine())
    if number is None or max(nodes) >= MASK_BITS:
        log.info("weights lie on one node's memory: no mbind(2) for %s, nodes %s", platform.machine(), nodes)
        return False
    words = (ctypes.c_uint64 * (MASK_BITS // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
    # The kernel reads one bit less than it is told.
    rest = (ctypes.c_long(MPOL_INTERLEAVE), words, ctypes.c_ulong(MASK_BITS + 1), ctypes.c_ulong(0))
    if libc.syscall(*arguments, *rest) == 0:
        return True
    log.info("weights lie on one node's memory: %s", os.strerror(ctypes.get_errno()))
    return False


def _processors_of_threads() -> set[int]:
    processors = set(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            processors |= os.sched_getaffinity(int(thread.name))
    return processors


def _listed(text: str) -> set[int]:
    """Read a list such as ``0-3,8``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
