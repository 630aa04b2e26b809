"""Several emulated devices that run concurrently, each launched by its own thread, so that ranks' kernels really wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from tests.cuda.emulated import EmulatedDevice

from quintet.executor.backends.cuda.ops.collectives import MAILBOX_BYTES, Peers

ResultT = TypeVar("ResultT")


@cache
def devices_of(size: int) -> tuple[EmulatedDevice, ...]:
    """Return the devices of ``size`` ranks: all blocks run in one order, since different orders would deadlock."""
    seed = int(os.environ.get("QUINTET_EMULATION_SEED", "1"))
    return tuple(EmulatedDevice(seed=seed, rank=rank) for rank in range(size))


def peers_of(devices: Sequence[EmulatedDevice], timeout_s: float = 60.0) -> list[Peers]:
    """Return each rank's view of unused mailboxes."""
    handles = [device.share_memory(MAILBOX_BYTES)[1] for device in devices]
    peers = [
        Peers(device, rank, [device.open_memory(handle) for handle in handles])
        for rank, device in enumerate(devices)
    ]
    for each in peers:
        each.limit_waits(timeout_s)
    return peers


def run_concurrently(works: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
    """Call each function in its own thread; return their results; raise the first error."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [each.result() for each in [threads.submit(work) for work in works]]
