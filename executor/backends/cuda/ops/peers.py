"""Exchange between ranks through mailboxes in peer memory.

``csrc/cuda/peers.cuh`` documents the mailbox layout and the synchronization; the sizes here mirror it. All ranks launch the same
exchanges in the same order, each with at most `CHANNELS` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.device import Argument, Device

SIZES = (2, 4, 8)
"""Supported numbers of ranks."""
MAX_RANKS, CHANNELS, HALF_BYTES = 8, 64, 32 << 10
MAILBOX_BYTES = CHANNELS * (MAX_RANKS * 4 + 2 * HALF_BYTES)
THREADS = 512
EXCHANGE = "pippl"
"""Kinds of the first parameters of an exchange."""
WAIT_TIMEOUT_S = 60.0
"""Time that a rank's kernels wait for another rank in a step; long enough for a graph capture on the other rank. The supervisor
detects a dead process much earlier."""
NO_TIMEOUT_NS = 2**63 - 1
"""During startup, when one rank may compile kernels for minutes."""


class RankDesyncError(RuntimeError):
    """Ranks are out of step: a wait timed out or launches differ. The device's results are invalid."""


class Peers:
    """Mailboxes of all ranks, as seen by one rank. All exchanges run in one stream."""

    def __init__(self, device: Device, rank: int, mailboxes: Sequence[int]) -> None:
        """mailboxes: device address of each rank's `MAILBOX_BYTES`, initially zeros. Waits have no timeout at first."""
        if len(mailboxes) not in SIZES or not 0 <= rank < len(mailboxes):
            raise ValueError(
                f"rank is {rank} of {len(mailboxes)}; expected {SIZES} ranks, and a rank among them"
            )
        self.rank, self.size = rank, len(mailboxes)
        self._mailboxes = torch.tensor(mailboxes, dtype=torch.int64).to(device.torch_device)
        self._counts = torch.zeros(1 + CHANNELS, dtype=torch.int32, device=device.torch_device)
        self._timed_out = device.pinned((1,), torch.int32).zero_()
        self._timeout_ns = NO_TIMEOUT_NS

    def limit_waits(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Set the timeout of exchanges launched or captured from now on."""
        self._timeout_ns = int(timeout_s * 1e9)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """First arguments of every exchange, `EXCHANGE`."""
        return (self._mailboxes, self.rank, self._counts, self._timed_out, self._timeout_ns)

    def check(self) -> None:
        """Raise `RankDesyncError` if a completed exchange timed out."""
        if int(self._timed_out[0]):
            raise RankDesyncError(
                f"rank {self.rank} of {self.size} timed out after {self._timeout_ns / 1e9:g} s waiting for another rank's"
                " device: a device hangs, or the ranks launched different steps"
            )


def chunks_of(num_units: int, unit_bytes: int) -> tuple[int, int]:
    """Return the number of blocks of an exchange, and the units per block."""
    chunk = min(max(-(-num_units // CHANNELS), THREADS), HALF_BYTES // unit_bytes)
    return min(CHANNELS, -(-num_units // chunk)), chunk
