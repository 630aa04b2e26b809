"""Cases of `bench.gpu.kernels` for sampling: the logits of a step are read from memory, and little else is moved.

The vocabulary is that of Llama 3. What must be read is one pass over the logits, whatever a kernel reads again. Few rows' logits
stay in the device's cache, as those of a step do that were just computed: shares above 100 % are possible there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.kernels import Case, num_calls
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.draw import draw
from quintet.executor.backends.cuda.ops.entries import entries
from quintet.executor.sampling.settings import RECORD

TOP = 20


def cases(device: Device, toy: bool) -> Iterator[Case]:
    """Yield the cases."""
    vocab_size = 2051 if toy else 128256
    for rows in (1, 3) if toy else (1, 32, 256):
        where = device.torch_device
        moved = 2.0 * rows * vocab_size
        logits = [
            (3 * torch.randn(rows, vocab_size, device=where)).to(torch.bfloat16)
            for _ in range(num_calls(moved, toy))
        ]
        positions = torch.arange(rows, dtype=torch.int32, device=where)
        own = torch.zeros(rows, dtype=torch.int32, device=where)
        drawn = torch.zeros(rows, dtype=torch.int32, device=where)
        settings = records(rows).to(where)
        ways = {
            "greedy draw": partial(draw, settings=None, slots=None, positions=positions, out=drawn),
            "top-p, top-k draw": partial(draw, settings=settings, slots=None, positions=positions, out=drawn),
        }
        for name, way in ways.items():
            yield Case(f"{name}, {rows} rows", [partial(way, device, each) for each in logits], moved)
        reports = [partial(entries, device, each, own, TOP) for each in logits]
        yield Case(f"log-probabilities of {TOP}, {rows} rows", reports, moved)


def records(rows: int) -> torch.Tensor:
    """Return the settings of rows that draw from the likely part of a warm spread."""
    table = np.zeros(rows, RECORD)
    for row in range(rows):
        table[row] = (1.0, -np.inf, 50, 0.9, row)
    return torch.from_numpy(table.view(np.uint8).reshape(rows, RECORD.itemsize))
