"""What ranks have, side by side, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import describe
from quintet.executor.backends.cuda.ops.peers import EXCHANGE, THREADS, Peers, pieces_of

UNITS = (16, 4, 2)
"""Bytes that a thread takes at a time: the most of which every rank's columns are multiples."""


class Columns:
    """Which columns each rank has of rows, in units of as many bytes as fit."""

    def __init__(self, device: Device, widths: Sequence[int], item_bytes: int) -> None:
        """widths: numbers of a row at each rank, of so many bytes each. Not for use while capturing."""
        row_bytes = [width * item_bytes for width in widths]
        fitting = [unit for unit in UNITS if not any(size % unit for size in row_bytes)]
        if not fitting or not any(widths):
            raise ValueError(
                f"columns of {list(widths)} numbers of {item_bytes} bytes: expected some, of 2 or 4"
            )
        self.widths, self.item_bytes, self.unit_bytes = tuple(widths), item_bytes, fitting[0]
        begins = [sum(row_bytes[:rank]) // self.unit_bytes for rank in range(len(widths) + 1)]
        self.begins = torch.tensor(begins, dtype=torch.int32).to(device.torch_device)

    @property
    def whole(self) -> int:
        """Numbers of a row of all ranks."""
        return sum(self.widths)


def gather(
    device: Device,
    peers: Peers,
    columns: Columns,
    num_rows: int,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Write all ranks' ``x [num_rows, own columns]`` into ``out [num_rows, all columns]``, side by side.

    x: None where this rank has no column; out: None where this rank wants nothing, as others may; both without gaps, at a
    multiple of `Columns.unit_bytes`. One may be the other where one rank has all.
    """
    own = columns.widths[peers.rank]
    for name, rows, width in (("x", x, own), ("out", out, columns.whole)):
        if rows is None:
            continue
        fits = rows.numel() == num_rows * width and rows.element_size() == columns.item_bytes
        if not fits or not rows.is_contiguous() or rows.data_ptr() % columns.unit_bytes:
            raise ValueError(
                f"{name}: expected {num_rows} rows of {width} numbers of {columns.item_bytes} bytes without gaps, at a multiple"
                f" of {columns.unit_bytes}, got {describe(rows)}"
            )
    if x is None and own:
        raise ValueError(f"x: expected rows of {own} numbers, got nothing")
    if not num_rows:
        return
    widest = max(columns.widths) * columns.item_bytes // columns.unit_bytes
    blocks, piece = pieces_of(num_rows * widest, columns.unit_bytes)
    device.launch(
        Kernel("gather", f"gather_{peers.size}_{columns.unit_bytes}", f"{EXCHANGE}pppii"),
        (blocks, 1, 1),
        (THREADS, 1, 1),
        (*peers.arguments, x, out, columns.begins, num_rows, piece),
    )
