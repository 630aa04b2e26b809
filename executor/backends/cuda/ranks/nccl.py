"""All-reduce of large messages by NCCL, through CuPy, on torch's stream. Importing this module needs CuPy.

NCCL divides a message into chunks of a ring or tree and rounds each partial sum. So the last bits of a value depend on its
position in the message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from cupy.cuda import nccl

from quintet.executor.distributed.parallel.ranks import Ranks

log = logging.getLogger("quintet")

DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""``ncclDataType_t`` of ``nccl.h``."""
SUM = 0
"""``ncclSum``."""
UNAVAILABLE = b""


def open_nccl(ranks: Ranks, index: int) -> Callable[[torch.Tensor], None] | None:
    """Return the all-reduce of a rank once all ranks call it; None, with a warning, if some rank has no NCCL.

    index: torch's device index.
    """
    share = ranks.share
    own = UNAVAILABLE
    if nccl.available:
        own = _to_bytes(nccl.get_unique_id()) if share.rank == 0 else b"available"
    replies = ranks.all_gather(own)
    if UNAVAILABLE in replies:
        log.warning(
            "NCCL is not available to CuPy: our kernel does all-reduces of every size, and large ones are slower; install"
            " a recent CuPy, which finds the NCCL of torch's CUDA builds"
        )
        return None
    communicator = nccl.NcclCommunicator(share.size, _from_bytes(replies[0]), share.rank)

    def all_reduce(x: torch.Tensor) -> None:
        address, stream = x.data_ptr(), torch._C._cuda_getCurrentRawStream(index)
        communicator.allReduce(address, address, x.numel(), DTYPES[x.dtype], SUM, stream)

    return all_reduce


def _to_bytes(unique_id: tuple[int, ...]) -> bytes:
    """Convert CuPy's id, a tuple of signed bytes."""
    return bytes(number & 0xFF for number in unique_id)


def _from_bytes(unique_id: bytes) -> tuple[int, ...]:
    return tuple(number - 256 if number > 127 else number for number in unique_id)
