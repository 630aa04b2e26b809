"""Drawing tokens on the device with ``csrc/cuda/sampling.cu``. The reference is `quintet.executor.sampling.draw`.

`draw` takes everything from the device, as a captured step has it; `DeviceDraw` takes what the sampler has on the host.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.logit_tiles import (
    SUFFIXES,
    check_column,
    check_logits,
    num_tiles,
    scan_tiles,
)
from quintet.executor.memory import to_device
from quintet.executor.ragged import Int
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.settings import RECORD, Settings

DRAW = {dtype: Kernel("sampling", f"draw_{suffix}", "plippppppp") for dtype, suffix in SUFFIXES.items()}
THREADS = 512
SHARED_BYTES_PER_TILE = 12
"""Of dynamic shared memory: a maximum and an amount."""


def draw(
    device: Device,
    logits: torch.Tensor,
    settings: torch.Tensor | None,
    slots: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a token for each of n rows of ``logits [S, vocab]`` (bf16, fp16 or fp32), which stay as they are: int32[n].

    settings: records of `RECORD`, 32 contiguous bytes a slot, in a tensor of any dtype; None: every row takes the most
    likely token, in one pass over the logits. slots: int32[n], whose settings a row has; -1: nobody's, and ``out`` keeps
    what it has there; None: row i has record i. positions: int32[n], where the token will stand, which the random number
    depends on. rows: int32[n], which rows of the logits, or None for the first n. scratch: see `tile_scratch`; made anew
    where None.

    A token depends on its row, settings and position alone, whatever the batch. Two launches, nothing read by the host.
    """
    count = len(positions)
    check_logits(logits)
    _check_settings(settings, slots, count, logits)
    check_column("slots", slots, count, logits)
    check_column("positions", positions, count, logits)
    check_column("rows", rows, count, logits)
    check_column("out", out, count, logits)
    if rows is None and count > len(logits):
        raise ValueError(f"positions are of {count} rows; logits have {len(logits)}, and rows is None")
    if out is None:
        out = torch.empty(count, dtype=torch.int32, device=logits.device)
    if not count:
        return out
    maxima, sums = scan_tiles(device, logits, rows, settings, slots, count, 0.0, scratch)
    device.launch(
        DRAW[logits.dtype],
        (count, 1, 1),
        (THREADS, 1, 1),
        (
            *(logits, logits.stride(0), logits.shape[1], rows),
            *(settings, slots, positions, maxima, sums, out),
        ),
        shared_bytes=SHARED_BYTES_PER_TILE * num_tiles(logits.shape[1]),
    )
    return out


def _check_settings(
    settings: torch.Tensor | None, slots: torch.Tensor | None, count: int, logits: torch.Tensor
) -> None:
    if settings is None:
        return
    is_table = settings.dim() == 2 and settings.is_contiguous() and settings.device == logits.device
    if not is_table or settings.shape[1] * settings.element_size() != RECORD.itemsize:
        raise ValueError(
            f"settings are {settings.dtype}{list(settings.shape)} on {settings.device}; expected contiguous records of"
            f" {RECORD.itemsize} bytes on {logits.device}"
        )
    if slots is None and len(settings) < count:
        raise ValueError(
            f"settings has {len(settings)} records for {count} rows; it needs one each where slots is None"
        )


class DeviceDraw:
    """The sampler's `quintet.executor.sampling.ops.Draw`: one small upload a call."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(
        self,
        logits: torch.Tensor,
        settings: Settings,
        slots: Int,
        positions: Int,
        rows: Int | None = None,
        masks: Masks | None = None,
    ) -> torch.Tensor:
        """See `quintet.executor.sampling.draw`."""
        count = len(slots)
        if masks is not None:
            chosen = logits[:count] if rows is None else logits[to_device(rows, logits.device)]
            logits, rows = masks.applied(chosen, slots), None
        mine = settings[slots]
        is_greedy = not mine["temperature"].any()
        words = np.empty(count * (RECORD.itemsize // 4 + 2), np.int32)
        records, columns = np.split(words, [count * (RECORD.itemsize // 4)])
        records[:] = mine.view(np.int32)
        columns[:count] = positions
        columns[count:] = np.arange(count) if rows is None else rows
        there = to_device(words, logits.device)
        where = there[len(records) :].view(2, count)
        return draw(
            self._device,
            logits,
            None if is_greedy else there[: len(records)].view(count, -1),
            None,
            where[0],
            rows=where[1],
        )
