"""Dequantize GGML blocks to float32, with the rounding of the reference implementation.

Each function takes blocks as bytes, ``[num_blocks, block_bytes]``, and returns values, ``[num_blocks, block]``.
Format: structs of ggml-common.h in ggml-org/llama.cpp and their readers in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.checkpoints.gguf.blocks import dequantize_iq as iq
from quintet.executor.checkpoints.gguf.blocks.bits import bits_of
from quintet.executor.checkpoints.gguf.blocks.integers import INTEGERS
from quintet.executor.checkpoints.gguf.types import GgmlType

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Doubled values of the MXFP4 codes (OCP Microscaling Formats 1.0, section 5.3.3)."""
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
    if name in READERS:
        return READERS[name]
    integers = INTEGERS[name]
    return lambda blocks: integers(blocks).floats()


def q8_k(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize Q8_K: 8 bits with a float32 scale; trailing group sums are ignored."""
    return blocks[:, :4].contiguous().view(torch.float32) * _signed(blocks[:, 4:260])


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4: 4-bit floats with a power of two."""
    exponent = blocks[:, :1].int()
    # Half of the power, since E2M1 is doubled.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    chosen = torch.tensor(E2M1, dtype=torch.float32)[bits_of(blocks[:, 1:], 16, 4).int()]
    return bits.view(torch.float32) * chosen


def _signed(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.int8).float()


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_K": q8_k,
    "IQ1_S": iq.iq1_s,
    "IQ1_M": iq.iq1_m,
    "IQ2_XXS": iq.iq2_xxs,
    "IQ2_XS": iq.iq2_xs,
    "IQ2_S": iq.iq2_s,
    "IQ3_XXS": iq.iq3_xxs,
    "IQ3_S": iq.iq3_s,
    "MXFP4": mxfp4,
}
"""Keyed by type name: types outside `INTEGERS`."""
