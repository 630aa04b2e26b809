"""Collectives of ranks in one launch each: all-reduce for row-parallel layers, and gather of the ranks' columns.

Ranks exchange rows through mailboxes in peer memory. ``csrc/cuda/peers.cuh`` documents the mailbox layout and the
synchronization; the sizes here mirror it. All ranks launch the same exchanges in the same order, each with at most `CHANNELS`
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.device import Argument, Device, Kernel
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES, check_vector, describe, number_format

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


UNITS = (16, 4, 2)
"""Possible bytes per thread access of a gather; the largest that divides every rank's row size is used."""


def all_reduce(
    device: Device,
    peers: Peers,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of all ranks' ``x [rows, width]`` plus the bias, with the same bits at every rank.

    bf16, fp16 or fp32; x and out are contiguous and 16-byte aligned; bias: ``[width]``. ``out`` may be ``x``. An element's bits
    depend only on the ranks' values, not on the message size or its position.
    """
    out = torch.empty_like(x) if out is None else out
    for name, rows in (("x", x), ("out", out)):
        fits = rows.shape == x.shape and rows.dtype == x.dtype and rows.is_contiguous()
        if not fits or rows.ndim != 2 or rows.data_ptr() % PACK_BYTES:
            raise ValueError(
                f"{name}: expected contiguous {x.dtype}{list(x.shape)} at a multiple of {PACK_BYTES} bytes, got {describe(rows)}"
            )
    if bias is not None:
        check_vector("bias", bias, x)
    if not x.numel():
        return out
    width, pack = x.shape[1], PACK_BYTES // x.element_size()
    unit = pack if width % pack == 0 else 1  # elements
    blocks, chunk = chunks_of(x.numel() // unit, unit * x.element_size())
    variant = "" if unit > 1 else "single_"
    name = f"all_reduce_{peers.size}_{variant}{number_format(x)}"
    device.launch(
        Kernel("all_reduce", name, f"{EXCHANGE}ppplii"),
        (blocks, 1, 1),
        (THREADS, 1, 1),
        (*peers.arguments, x, bias, out, x.numel(), width, chunk * unit),
    )
    return out


class Columns:
    """Columns of each rank, in the largest common unit."""

    def __init__(self, device: Device, widths: Sequence[int], item_bytes: int) -> None:
        """widths: row width of each rank in elements of ``item_bytes``. Must not be called during capture."""
        row_bytes = [width * item_bytes for width in widths]
        units = [unit for unit in UNITS if not any(size % unit for size in row_bytes)]
        if not units or not any(widths):
            raise ValueError(
                f"columns have widths {list(widths)} and elements of {item_bytes} bytes; expected at least one column, and"
                " elements of 2 or 4 bytes"
            )
        self.widths, self.item_bytes, self.unit_bytes = tuple(widths), item_bytes, units[0]
        begins = [sum(row_bytes[:rank]) // self.unit_bytes for rank in range(len(widths) + 1)]
        self.begins = torch.tensor(begins, dtype=torch.int32).to(device.torch_device)

    @property
    def whole(self) -> int:
        """Row width of all ranks together."""
        return sum(self.widths)


def gather(
    device: Device,
    peers: Peers,
    columns: Columns,
    num_rows: int,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Concatenate all ranks' ``x [num_rows, own columns]`` into ``out [num_rows, all columns]``.

    x: None if this rank has no columns; out: None if this rank does not need the result. Both are contiguous and aligned to
    `Columns.unit_bytes`. They may be the same tensor if one rank has all columns.
    """
    own = columns.widths[peers.rank]
    for name, rows, width in (("x", x, own), ("out", out, columns.whole)):
        if rows is None:
            continue
        fits = rows.numel() == num_rows * width and rows.element_size() == columns.item_bytes
        if not fits or not rows.is_contiguous() or rows.data_ptr() % columns.unit_bytes:
            raise ValueError(
                f"{name}: expected {num_rows} contiguous rows of {width} elements of {columns.item_bytes} bytes, aligned to"
                f" {columns.unit_bytes} bytes, got {describe(rows)}"
            )
    if x is None and own:
        raise ValueError(f"x: expected rows of {own} elements, got None")
    if not num_rows:
        return
    widest = max(columns.widths) * columns.item_bytes // columns.unit_bytes
    blocks, chunk = chunks_of(num_rows * widest, columns.unit_bytes)
    device.launch(
        Kernel("gather", f"gather_{peers.size}_{columns.unit_bytes}", f"{EXCHANGE}pppii"),
        (blocks, 1, 1),
        (THREADS, 1, 1),
        (*peers.arguments, x, out, columns.begins, num_rows, chunk),
    )
