"""What ranks do together on their devices in the middle of a step: sums, columns side by side, the ids that rank 0 has.

Everything is launched on the current stream, by all ranks in the same order, and may be captured. Two ways of adding: our kernel
over each other's memory, whose bits depend on the numbers alone, and a library's for large messages, whose order of summing
depends on where a number lies in the message, and so on the batch: never with ``--batch-invariant``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.all_reduce import all_reduce
from quintet.executor.backends.cuda.ops.gather import Columns, gather
from quintet.executor.backends.cuda.ops.peers import MAILBOX_BYTES, Peers
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import KeptRange, Share

ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
"""By ranks, the largest message that our kernel adds where a library is there: each rank reads all others' whole, so from some
size on links are the limit. Not measured; about where others who add in both ways change over."""

ID_BYTES = 4
"""Of a token."""


class SumsLibrary(Protocol):
    """Who adds large messages."""

    def add(self, x: torch.Tensor) -> None:
        """Launch: write the sum of all ranks' ``x``, contiguous, over each rank's, rounded as its number format has it."""


class DeviceGroup:
    """One rank's view of it."""

    def __init__(
        self, device: Device, share: Share, peers: Peers, library: SumsLibrary | None = None
    ) -> None:
        """library: None where nobody else may add."""
        self.share = share
        self._device = device
        self._peers = peers
        self._library = library
        self._ids = Columns(device, [1] + [0] * (share.size - 1), ID_BYTES)
        self._columns: dict[tuple[tuple[int, ...], int], Columns] = {}
        """By numbers of a row at each rank and bytes of a number; made in a step that is not captured."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that draws."""
        return self.share.rank == 0

    def check(self) -> None:
        """See `Peers.check`."""
        self._peers.check()

    def limit_waits(self) -> None:
        """See `Peers.limit_waits`: boot is over, and every rank has loaded what steps launch."""
        self._peers.limit_waits()

    def add(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of all ranks' ``x [rows, width]``, plus the bias ``[width]``. ``x`` is not to be read any more."""
        x = x.contiguous()
        if self._library is None or x.nbytes <= ONE_SHOT_BYTES[self.share.size]:
            return all_reduce(self._device, self._peers, x, bias, x)
        self._library.add(x)
        return x if bias is None else x.add_(bias)

    def side_by_side(self, x: torch.Tensor, kept: KeptRange) -> torch.Tensor:
        """Return the rows of which each rank has such columns ``x [rows, kept.count]``, whole, at every rank.

        Of neighbours that keep the same ones, since there are fewer KV heads than ranks, the first gives them.
        """
        whole, size = x.new_empty(len(x), kept.whole), self.share.size
        alike = size * kept.count // kept.whole
        self._gather(x, whole, tuple(0 if rank % alike else kept.count for rank in range(size)))
        return whole

    def logits(self, x: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """Return the rows of which each rank has its part of the vocabulary, whole: at the first rank; None at others."""
        whole = x.new_empty(len(x), vocab_size) if self.is_first else None
        ranks = range(self.share.size)
        self._gather(x, whole, tuple(Share(rank, self.share.size).of(vocab_size).count for rank in ranks))
        return whole

    def take_ids(self, ids: torch.Tensor) -> None:
        """Write the first rank's ids, int32[tokens], over everybody's: its token table alone has what was drawn."""
        gather(self._device, self._peers, self._ids, len(ids), ids if self.is_first else None, ids)

    def _gather(self, x: torch.Tensor, whole: torch.Tensor | None, widths: tuple[int, ...]) -> None:
        key = widths, x.element_size()
        if key not in self._columns:
            self._columns[key] = Columns(self._device, *key)
        own = x.contiguous() if widths[self.share.rank] else None
        gather(self._device, self._peers, self._columns[key], len(x), own, whole)


def meet_peers(device: Device, ranks: Ranks) -> Peers:
    """Return this rank's view of all mailboxes, once every rank is here. Raises `ConfigError` for devices out of reach."""
    address, handle = device.share_memory(MAILBOX_BYTES)
    rank = ranks.share.rank
    handles = enumerate(ranks.exchange(handle))
    return Peers(
        device, rank, [address if other == rank else device.open_memory(told) for other, told in handles]
    )
