"""Collectives of tensor-parallel ranks on their devices: all-reduce, all-gather of columns, broadcast of token ids.

All ranks launch them on the current stream in the same order, and graphs may capture them. Two all-reduce
implementations:

- Our one-shot kernel over peer memory; its bits depend only on the values.
- A library for large messages. Its order of summation depends on the position in the message, and so on the batch. It is not used
  with ``--batch-invariant``.

`open_device_ranks` sets up the ranks of a model: shared host memory for orders, and mailboxes on the devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.collectives import MAILBOX_BYTES, Columns, Peers, all_reduce, gather
from quintet.executor.backends.cuda.ranks.rank_broadcast import device_ranks_shape
from quintet.executor.distributed.parallel.ranks import SPINS, Ranks
from quintet.executor.model_config.share import KeptRange, Share, share_of
from quintet.wire.config import EngineConfig

log = logging.getLogger("quintet")

NCCL_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""``ncclDataType_t`` of ``nccl.h``."""
NCCL_SUM = 0
"""``ncclSum``."""
UNAVAILABLE = b""

ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
"""Largest message of our one-shot kernel if a library is available, by number of ranks. Every rank reads all messages, so links
limit large ones. Not measured; close to the thresholds of other engines."""

ID_BYTES = 4
"""Size of a token id."""


LargeAllReduce = Callable[[torch.Tensor], None]
"""Launches an in-place sum over all ranks' contiguous tensors, rounded to their dtype."""


class DeviceCommunicator:
    """Collectives of one rank."""

    def __init__(
        self, device: Device, share: Share, peers: Peers, library: LargeAllReduce | None = None
    ) -> None:
        """library: None to use only our kernel."""
        self.share = share
        self._device = device
        self.peers = peers
        self._library = library
        self._ids = Columns(device, [1] + [0] * (share.size - 1), ID_BYTES)
        self._columns: dict[tuple[tuple[int, ...], int], Columns] = {}
        """By row widths of the ranks and element size; created in an eager step."""

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which draws tokens."""
        return self.share.rank == 0

    def add(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of all ranks' ``x [rows, width]`` plus the bias ``[width]``. Overwrites ``x``."""
        x = x.contiguous()
        if self._library is None or x.nbytes <= ONE_SHOT_BYTES[self.share.size]:
            return all_reduce(self._device, self.peers, x, bias, x)
        self._library(x)
        return x if bias is None else x.add_(bias)

    def all_gather_columns(self, x: torch.Tensor, kept: KeptRange) -> torch.Tensor:
        """Gather the ranks' columns ``x [rows, kept.count]`` into whole rows, at every rank.

        If several adjacent ranks hold the same columns (fewer KV heads than ranks), only the first contributes.
        """
        whole, size = x.new_empty(len(x), kept.whole), self.share.size
        replicas = size * kept.count // kept.whole
        self._gather(x, whole, tuple(0 if rank % replicas else kept.count for rank in range(size)))
        return whole

    def logits(self, x: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """Gather the vocabulary shards ``x`` into whole rows at rank 0; return None at other ranks."""
        whole = x.new_empty(len(x), vocab_size) if self.is_first else None
        ranks = range(self.share.size)
        self._gather(x, whole, tuple(Share(rank, self.share.size).of(vocab_size).count for rank in ranks))
        return whole

    def broadcast_ids(self, ids: torch.Tensor) -> None:
        """Overwrite ``ids``, int32[tokens], with rank 0's: only its token table has the drawn tokens."""
        gather(self._device, self.peers, self._ids, len(ids), ids if self.is_first else None, ids)

    def _gather(self, x: torch.Tensor, whole: torch.Tensor | None, widths: tuple[int, ...]) -> None:
        key = widths, x.element_size()
        if key not in self._columns:
            self._columns[key] = Columns(self._device, *key)
        own = x.contiguous() if widths[self.share.rank] else None
        gather(self._device, self.peers, self._columns[key], len(x), own, whole)


def open_peers(device: Device, ranks: Ranks) -> Peers:
    """Exchange mailbox handles with all ranks and map their mailboxes. Raises `ConfigError` for inaccessible devices."""
    address, handle = device.share_memory(MAILBOX_BYTES)
    rank = ranks.share.rank
    handles = enumerate(ranks.all_gather(handle))
    return Peers(
        device, rank, [address if peer == rank else device.open_memory(each) for peer, each in handles]
    )


def open_device_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Map the ranks' shared memory. descriptor: of the memory file."""
    shape = device_ranks_shape(config.executor.tensor_parallel_size)
    return Ranks(descriptor, share_of(config.executor, rank), shape, spins=SPINS)


def open_nccl(ranks: Ranks, index: int) -> LargeAllReduce | None:
    """Return NCCL's all-reduce, through CuPy, once all ranks call it; None, with a warning, if some rank has no NCCL.

    NCCL divides a message into chunks of a ring or tree and rounds each partial sum. So the last bits of a value depend on
    its position in the message. index: torch's device index.
    """
    from cupy.cuda import nccl

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

    def add(x: torch.Tensor) -> None:
        address, stream = x.data_ptr(), torch._C._cuda_getCurrentRawStream(index)
        communicator.allReduce(address, address, x.numel(), NCCL_DTYPES[x.dtype], NCCL_SUM, stream)

    return add


def _to_bytes(unique_id: tuple[int, ...]) -> bytes:
    """Convert CuPy's id, a tuple of signed bytes."""
    return bytes(number & 0xFF for number in unique_id)


def _from_bytes(unique_id: bytes) -> tuple[int, ...]:
    return tuple(number - 256 if number > 127 else number for number in unique_id)


def communicator_of(device: Device, ranks: Ranks, config: EngineConfig) -> DeviceCommunicator:
    """Return a rank's collectives. All ranks call it."""
    peers = open_peers(device, ranks)
    library: LargeAllReduce | None = None
    if device.torch_device.type == "cuda" and not config.executor.batch_invariant:
        library = open_nccl(ranks, device.torch_device.index)
    return DeviceCommunicator(device, ranks.share, peers, library)
