"""Host memory for swapped blocks of all ranks; each rank holds its share of every block."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.distributed.parallel.library import PAIR_BYTES, OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.kv_transfer.features.kv_offload import HostBlocks


class Moves:
    """Moves blocks on all ranks at the same time: on this stage and on the following ones."""

    def __init__(self, group: Ranks | None, following: Ranks | None = None) -> None:
        """group: the ranks of this stage, if there are several; behind: the link to the next stage."""
        self._group, self._following = group, following

    def move(self, kind: OrderKind, pairs: bytes, own: Callable[[bytes], None]) -> None:
        """Send the order to the other ranks; ``own`` executes it on this rank."""
        if self._following is not None:
            self._following.send_mail(kind, pairs, PAIR_BYTES)
        if self._group is None:
            own(pairs)
        else:
            self._group.move_blocks(kind, pairs, own)


class HostBlocksOfAllRanks:
    """The `HostBlocks` of the leader; the followers copy their shares at the same time."""

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
        """Return the measured rate of the leader's share in bytes per second."""
        return self._own.measure()
