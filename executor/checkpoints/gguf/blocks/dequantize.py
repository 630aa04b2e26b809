"""Dequantize GGML blocks to float32, with the rounding of the reference implementation.

Each function takes blocks as bytes, ``[num_blocks, block_bytes]``, and returns values, ``[num_blocks, block]``.
Format: structs of ggml-common.h in ggml-org/llama.cpp and their readers in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quintet.executor.checkpoints.gguf.blocks.integers import INTEGERS
from quintet.executor.checkpoints.gguf.types import GgmlType

_CHUNK_BYTES = 1 << 22
"""Bytes dequantized at a time; intermediates fit in a cache."""


def dequantize(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Dequantize contiguous blocks to ``out``, flat and of any floating-point format."""
    if kind.name in PLAIN:
        out.copy_(raw.view(PLAIN[kind.name]))
        return
    read, step = _reader(kind.name), max(1, _CHUNK_BYTES // kind.block_bytes)
    blocks, numbers = raw.view(-1, kind.block_bytes), out.view(-1, kind.block)
    for begin in range(0, len(blocks), step):
        numbers[begin : begin + step] = read(blocks[begin : begin + step])


def _reader(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "Q8_K":
        return q8_k
    if name not in INTEGERS:
        return partial(_by_package, name)
    integers = INTEGERS[name]
    return lambda blocks: integers(blocks).floats()


def _by_package(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize with the ``gguf`` package: types that the kernels do not multiply."""
    import gguf  # slow, and rarely needed

    with np.errstate(all="ignore"):  # scales may be infinite
        values = gguf.dequantize(blocks.reshape(1, -1).numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(values).view(len(blocks), -1)


def q8_k(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize Q8_K: 8 bits with a float32 scale; trailing group sums are ignored."""
    scales, codes = (blocks[:, each].contiguous() for each in (slice(4), slice(4, 260)))
    return scales.view(torch.float32) * codes.view(torch.int8).float()


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
