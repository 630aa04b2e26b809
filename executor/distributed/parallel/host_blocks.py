"""Host memory for blocks of all ranks: each has room for its own share of them."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.distributed.parallel.library import PAIR_BYTES, OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.kv_transfer.features.kv_offload import HostBlocks


class Moves:
    """Has blocks moved by all ranks at the same time: of this one's stage, and of those behind it."""

    def __init__(self, group: Ranks | None, behind: Ranks | None = None) -> None:
        """group: the ranks of this one's stage, where there are others; behind: what the next stage is told by."""
        self._group, self._behind = group, behind

    def move(self, kind: OrderKind, pairs: bytes, own: Callable[[bytes], None]) -> None:
        """Have the others do what the order says; ``own`` does this rank's."""
        if self._behind is not None:
            self._behind.tell_mail(kind, pairs, PAIR_BYTES)
        if self._group is None:
            own(pairs)
        else:
            self._group.move_blocks(kind, pairs, own)


class HostBlocksOfAllRanks:
    """The `HostBlocks` of rank 0, which has the others copy theirs at the same time."""

    def __init__(self, own: HostBlocks, moves: Moves) -> None:
        self._own, self._moves = own, moves
        self.num_blocks = own.num_blocks

    def copy_out(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_out`."""
        self._moves.move(OrderKind.SWAP_OUT, pairs, self._own.copy_out)

    def copy_in(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_in`."""
        self._moves.move(OrderKind.SWAP_IN, pairs, self._own.copy_in)

    def measure(self) -> int:
        """Return bytes per second, of rank 0's share alone."""
        return self._own.measure()
