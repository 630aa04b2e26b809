"""Host memory for blocks of all ranks: each has room for its own share of them."""

from __future__ import annotations

from quintet.executor.features.kv_offload import HostBlocks
from quintet.executor.parallel.library import PAIR_BYTES, OrderKind
from quintet.executor.parallel.ranks import Ranks


class HostBlocksOfAllRanks:
    """The `HostBlocks` of rank 0, which has the others copy theirs at the same time."""

    def __init__(self, own: HostBlocks, group: Ranks | None, behind: Ranks | None = None) -> None:
        """group: the ranks of this one's stage, where there are others; behind: what the next stage is told by."""
        self._own = own
        self._group, self._behind = group, behind
        self.num_blocks = own.num_blocks

    def copy_out(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_out`."""
        self._copy(OrderKind.SWAP_OUT, pairs)

    def copy_in(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_in`."""
        self._copy(OrderKind.SWAP_IN, pairs)

    def _copy(self, kind: OrderKind, pairs: bytes) -> None:
        if self._behind is not None:
            self._behind.tell_mail(kind, pairs, PAIR_BYTES)
        copy = self._own.copy_out if kind is OrderKind.SWAP_OUT else self._own.copy_in
        if self._group is None:
            copy(pairs)
        else:
            self._group.move_blocks(kind, pairs, copy)

    def measure(self) -> int:
        """Return bytes per second, of rank 0's share alone."""
        return self._own.measure()
