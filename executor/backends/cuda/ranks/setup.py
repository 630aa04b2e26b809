"""Setup of the ranks of a model on several GPUs: shared host memory for orders, and mailboxes on the devices."""

from __future__ import annotations

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ranks.group import AllReduceLibrary, DeviceGroup, open_peers
from quintet.executor.backends.cuda.ranks.rank_broadcast import device_ranks_shape
from quintet.executor.distributed.parallel.ranks import SPINS, Ranks
from quintet.executor.model_config.share import share_of
from quintet.wire.config import EngineConfig


def open_device_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Map the ranks' shared memory. descriptor: of the memory file."""
    shape = device_ranks_shape(config.executor.tensor_parallel_size)
    return Ranks(descriptor, share_of(config.executor, rank), shape, spins=SPINS)


def group_of(device: Device, ranks: Ranks, config: EngineConfig) -> DeviceGroup:
    """Return a rank's collectives. All ranks call it."""
    peers = open_peers(device, ranks)
    library: AllReduceLibrary | None = None
    if device.torch_device.type == "cuda" and not config.executor.batch_invariant:
        from quintet.executor.backends.cuda.ranks.nccl import open_nccl  # needs CuPy

        library = open_nccl(ranks, device.torch_device.index)
    return DeviceGroup(device, ranks.share, peers, library)
