"""Cases of `bench.gpu.kernels` for sampling, compared with one read of the logits.

The vocabulary is that of Llama 3. Further reads of a kernel are not counted. Logits of few rows stay in the device's cache, as
after the output layer of a step, so shares above 100 % are possible.
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
        zeros = torch.zeros(rows, dtype=torch.int32, device=where)
        sampled = torch.zeros(rows, dtype=torch.int32, device=where)
        settings = records(rows).to(where)
        variants = {
            "greedy draw": partial(draw, settings=None, slots=None, positions=positions, out=sampled),
            "top-p, top-k draw": partial(
                draw, settings=settings, slots=None, positions=positions, out=sampled
            ),
        }
        for name, sample in variants.items():
            yield Case(f"{name}, {rows} rows", [partial(sample, device, each) for each in logits], moved)
        reports = [partial(entries, device, each, zeros, TOP) for each in logits]
        yield Case(f"log-probabilities of {TOP}, {rows} rows", reports, moved)


def records(rows: int) -> torch.Tensor:
    """Return settings of rows with temperature 1, top-k 50 and top-p 0.9."""
    table = np.zeros(rows, RECORD)
    for row in range(rows):
        table[row] = (1.0, -np.inf, 50, 0.9, row)
    return torch.from_numpy(table.view(np.uint8).reshape(rows, RECORD.itemsize))
