"""Sampling of tokens with ``csrc/cuda/sampling.cu``; the reference is `quintet.executor.sampling.draw`.

`draw` takes all inputs from the device, so it can be captured. `draw_on_device` takes the sampler's host arrays.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.ops.logit_tiles import (
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
"""Dynamic shared memory: a maximum and a sum of weights."""


def draw(
    device: Device,
    logits: torch.Tensor,
    settings: torch.Tensor | None,
    slots: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each of n rows of ``logits [S, vocab]`` (bf16, fp16 or fp32): int32[n]. The logits are not changed.

    - settings: records of `RECORD`, 32 contiguous bytes per slot, in a tensor of any dtype; None: greedy, in one pass.
    - slots: int32[n], slot of each row's settings; -1: the row is skipped and ``out`` is unchanged; None: row i has record i.
    - positions: int32[n], position of the drawn token; input of the random number generator.
    - rows: int32[n], rows of the logits; None: the first n.

    A token depends only on its row, settings and position. Two launches; no host sync.
    """
    count = len(positions)
    check_logits(logits)
    _check_settings(settings, slots, count, logits)
    check_column("slots", slots, count, logits)
    check_column("positions", positions, count, logits)
    check_column("rows", rows, count, logits)
    check_column("out", out, count, logits)
    if rows is None and count > len(logits):
        raise ValueError(
            f"positions have {count} rows; expected at most {len(logits)}, the rows of logits, or rows"
        )
    if out is None:
        out = torch.empty(count, dtype=torch.int32, device=logits.device)
    if not count:
        return out
    maxima, sums = scan_tiles(device, logits, rows, settings, slots, count, 0.0)
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
            f"settings have {len(settings)} records for {count} rows; without slots, each row needs one"
        )


def draw_on_device(
    device: Device,
    logits: torch.Tensor,
    settings: Settings,
    slots: Int,
    positions: Int,
    rows: Int | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """See `quintet.executor.sampling.draw`. One small upload."""
    count = len(slots)
    if masks is not None:
        selected = logits[:count] if rows is None else logits[to_device(rows, logits.device)]
        logits, rows = masks.applied(selected), None
    row_settings = settings[slots]
    is_greedy = not row_settings["temperature"].any()
    words = np.empty(count * (RECORD.itemsize // 4 + 2), np.int32)
    records, columns = np.split(words, [count * (RECORD.itemsize // 4)])
    records[:] = row_settings.view(np.int32)
    columns[:count] = positions
    columns[count:] = np.arange(count) if rows is None else rows
    on_device = to_device(words, logits.device)
    device_columns = on_device[len(records) :].view(2, count)
    return draw(
        device,
        logits,
        None if is_greedy else on_device[: len(records)].view(count, -1),
        None,
        device_columns[0],
        rows=device_columns[1],
    )
