"""Sums of large messages by NCCL, through CuPy, on torch's stream. Importing this module needs CuPy.

NCCL divides a message into pieces that go round a ring, or up a tree, and adds in that order, rounding each sum: so a number's
last bits depend on where it lies in the message.
"""

from __future__ import annotations

import logging

import torch
from cupy.cuda import nccl

from quintet.executor.distributed.parallel.ranks import Ranks

log = logging.getLogger("quintet")

DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""``ncclDataType_t`` of ``nccl.h``."""
SUM = 0
"""``ncclSum``."""
NOT_THERE = b""


class Nccl:
    """A `quintet.executor.backends.cuda.group.SumsLibrary`: one rank's part of a communicator."""

    def __init__(self, communicator: nccl.NcclCommunicator, index: int) -> None:
        """index: of the device, as torch counts."""
        self._communicator = communicator
        self._index = index

    def add(self, x: torch.Tensor) -> None:
        """See `SumsLibrary`."""
        address, stream = x.data_ptr(), torch._C._cuda_getCurrentRawStream(self._index)
        self._communicator.allReduce(address, address, x.numel(), DTYPES[x.dtype], SUM, stream)


def open_nccl(ranks: Ranks, index: int) -> Nccl | None:
    """Return the communicator once every rank is here; None where one of them has no NCCL, for which a line is logged."""
    share = ranks.share
    own = NOT_THERE
    if nccl.available:
        own = _in_bytes(nccl.get_unique_id()) if share.rank == 0 else b"here"
    told = ranks.exchange(own)
    if NOT_THERE in told:
        log.warning(
            "NCCL is not there (CuPy finds none): sums of all sizes are added by our kernel, large ones more slowly; it comes"
            " with torch's CUDA builds, where a recent CuPy finds it"
        )
        return None
    communicator = nccl.NcclCommunicator(share.size, _of_bytes(told[0]), share.rank)
    return Nccl(communicator, index)


def _in_bytes(unique_id: tuple[int, ...]) -> bytes:
    """CuPy has them as signed numbers."""
    return bytes(number & 0xFF for number in unique_id)


def _of_bytes(told: bytes) -> tuple[int, ...]:
    return tuple(number - 256 if number > 127 else number for number in told)
