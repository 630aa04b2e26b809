"""Several emulated devices that compute at once, each launched by a thread of its own: what ranks' kernels wait for is real."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from tests.cuda.emulated import EmulatedDevice

from quintet.executor.backends.cuda.ops.peers import MAILBOX_BYTES, Peers

ResultT = TypeVar("ResultT")


@cache
def devices_of(size: int) -> tuple[EmulatedDevice, ...]:
    """Return the devices of so many ranks: all blocks run in one order, as they would wait for ever in several."""
    seed = int(os.environ.get("QUINTET_EMULATION_SEED", "1"))
    return tuple(EmulatedDevice(seed=seed, rank=rank) for rank in range(size))


def peers_of(devices: Sequence[EmulatedDevice], timeout_s: float = 60.0) -> list[Peers]:
    """Return each rank's view of mailboxes that nobody has used."""
    handles = [device.share_memory(MAILBOX_BYTES)[1] for device in devices]
    peers = [
        Peers(device, rank, [device.open_memory(handle) for handle in handles])
        for rank, device in enumerate(devices)
    ]
    for each in peers:
        each.limit_waits(timeout_s)
    return peers


def at_once(works: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
    """Return what each returns, each called in a thread of its own; raise what the first one raised."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [each.result() for each in [threads.submit(work) for work in works]]
