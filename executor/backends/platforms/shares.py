"""Division of a machine among engines and ranks: processors or GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from quintet.executor.backends.platforms.cores import default_threads, nodes_of, siblings, usable_cores
from quintet.process.control_groups import SYSTEM
from quintet.wire.config import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
TASKS = Path("/proc/self/task")


def take_share(index: int, config: EngineConfig, rank: int = 0) -> EngineConfig:
    """Restrict this process to the share of a rank of engine ``index``, and return the matching configuration.

    Call it before anything computes or initialises a device. An engine added after startup shares processors with one of the
    initial engines; GPUs are never shared.
    """
    num_engines, num_ranks = config.processes.engines, config.executor.ranks_per_host
    if config.executor.kind == "mock" or (num_engines == config.executor.num_ranks == 1 and index == 0):
        return config
    if config.executor.device == "cuda":
        os.environ[VISIBLE] = devices_of(index, rank, num_ranks, os.environ.get(VISIBLE))
        return config
    num_shares, share = num_engines * num_ranks, index % num_engines * num_ranks + rank % num_ranks
    num_cores = usable_cores()
    threads = config.executor.threads or max(1, default_threads(num_cores) // num_shares)
    has_own = index < num_engines and threads * num_shares <= num_cores
    keep_to(share_of(os.sched_getaffinity(0), share, num_shares))
    executor = msgspec.structs.replace(config.executor, threads=threads, has_own_cores=has_own)
    return msgspec.structs.replace(config, executor=executor)


def keep_to(processors: Collection[int]) -> None:
    """Pin every existing thread of this process to the processors; new threads inherit the affinity.

    An unpinned thread would compute on other processors, and weights would be interleaved over their nodes too
    (`quintet.executor.backends.platforms.cores.usable_nodes` reads the affinity of all threads).
    """
    pinned: set[str] = set()
    while left := set(os.listdir(TASKS)) - pinned:  # repeat: an unpinned thread may have started another
        for task in left:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(task), processors)
        pinned |= left


def devices_of(index: int, rank: int, num_ranks: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES of a rank of engine ``index``: its own device first, then those of the other ranks.

    A missing device becomes an empty name, which ends the list for CUDA.
    """
    devices = [index * num_ranks + (rank + step) % num_ranks for step in range(num_ranks)]
    if not visible:
        return ",".join(map(str, devices))
    names = visible.split(",")
    return ",".join(names[each] if each < len(names) else "" for each in devices)


def share_of(processors: Collection[int], index: int, num_shares: int, system: Path = SYSTEM) -> set[int]:
    """Return the processors of share ``index``: whole cores, and whole NUMA nodes if the counts allow it.

    Return all processors if there are fewer cores than shares.
    """
    nodes = nodes_of(processors, system)
    cores: dict[tuple[int, str], set[int]] = {}
    for processor in sorted(processors):
        cores.setdefault((nodes.get(processor, 0), siblings(processor, system)), set()).add(processor)
    in_order = sorted(cores.values(), key=lambda core: (nodes.get(min(core), 0), min(core)))
    begin, end = (len(in_order) * at // num_shares for at in (index, index + 1))
    return set().union(*in_order[begin:end]) or set(processors)
