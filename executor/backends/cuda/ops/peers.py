"""What one of several ranks exchanges numbers by on its device: everybody's mailboxes, and how far each channel has come.

``csrc/cuda/peers.cuh`` says what lies in a mailbox, and why one meeting is enough; the sizes here are its own. All ranks launch
the same exchanges in the same order, each of at most `CHANNELS` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.device import Argument, Device

SIZES = (2, 4, 8)
"""Numbers of ranks that there are kernels for."""
MAX_RANKS, CHANNELS, HALF_BYTES = 8, 64, 32 << 10
MAILBOX_BYTES = CHANNELS * (MAX_RANKS * 4 + 2 * HALF_BYTES)
THREADS = 512
EXCHANGE = "pippl"
"""The kinds of an exchange's first parameters."""
PATIENCE_S = 60.0
"""How long a rank's kernels wait for another's in a step, whose host may be capturing a graph meanwhile; who is gone ends the
group long before."""
AS_LONG_AS_IT_TAKES_NS = 2**63 - 1
"""While kernels are compiled, which takes minutes, at one rank perhaps and not at another: at boot."""


class RankDesyncError(RuntimeError):
    """A rank waited too long for another one: what its device has computed since is worthless."""


class Peers:
    """One rank's view. Made when all ranks have their mailboxes; what is launched with it runs in one stream."""

    def __init__(self, device: Device, rank: int, mailboxes: Sequence[int]) -> None:
        """mailboxes: addresses, as this device has them, of `MAILBOX_BYTES` of each rank, zeros at first. Waits take as long as
        they take until `limit_waits`."""
        if len(mailboxes) not in SIZES or not 0 <= rank < len(mailboxes):
            raise ValueError(f"rank {rank} of {len(mailboxes)}: expected a rank of one of {SIZES}")
        self.rank, self.size = rank, len(mailboxes)
        self._mailboxes = torch.tensor(mailboxes, dtype=torch.int64).to(device.torch_device)
        self._counts = torch.zeros(1 + CHANNELS, dtype=torch.int32, device=device.torch_device)
        self._alarm = device.pinned((1,), torch.int32).zero_()
        self._patience_ns = AS_LONG_AS_IT_TAKES_NS

    def limit_waits(self, patience_s: float = PATIENCE_S) -> None:
        """Give up behind so long a wait in what is launched, or captured, from now on."""
        self._patience_ns = int(patience_s * 1e9)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The first of every exchange's arguments, `EXCHANGE`."""
        return (self._mailboxes, self.rank, self._counts, self._alarm, self._patience_ns)

    def check(self) -> None:
        """Raise `RankDesyncError` if an exchange that has ended waited too long."""
        if int(self._alarm[0]):
            raise RankDesyncError(
                f"rank {self.rank} of {self.size} waited {self._patience_ns / 1e9:g} s for what another one's device was to"
                " write: a device hangs, or ranks were told different things"
            )


def pieces_of(num_units: int, unit_bytes: int) -> tuple[int, int]:
    """Return how many blocks an exchange of so many units is launched with, and the units of one block's piece."""
    piece = min(max(-(-num_units // CHANNELS), THREADS), HALF_BYTES // unit_bytes)
    return min(CHANNELS, -(-num_units // piece)), piece
