"""Decode GGML blocks to integer codes, scales and minima (`INTEGERS`), and to float32 with the rounding of the reference
implementation.

Each function of a type takes blocks as bytes, ``[num_blocks, block_bytes]``. Format: structs of ggml-common.h in
ggml-org/llama.cpp and their readers in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.checkpoints.gguf.blocks.bits import bits_of, half_of
from quintet.executor.checkpoints.gguf.types import GgmlType

NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4's 4-bit codes."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""
_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
"""Factors that shift a base-3 digit to the front; higher digits overflow 8 bits."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Values of blocks: ``(code - zero) * scale - minimum``, rounded in float32 like the reference implementation."""

    codes: torch.Tensor
    """uint8 ``[num_blocks, values of a block]``."""
    zero: int
    scales: torch.Tensor
    """fp32 ``[num_blocks, groups]``: one for each group of adjacent values."""
    minima: torch.Tensor | None = None
    """fp32 ``[num_blocks, groups]``; None: no minima."""

    def floats(self) -> torch.Tensor:
        """Return the dequantized values, fp32 ``[num_blocks, values of a block]``."""
        groups = self.codes.float().view(len(self.codes), self.scales.shape[1], -1)
        numbers = (groups - self.zero) * self.scales[..., None]
        return (numbers if self.minima is None else numbers - self.minima[..., None]).flatten(1)


def q4_0(blocks: torch.Tensor) -> Integers:
    """Decode Q4_0: 4 bits, zero point 8."""
    return Integers(bits_of(blocks[:, 2:], 16, 4), 8, half_of(blocks, 0))


def q4_1(blocks: torch.Tensor) -> Integers:
    """Decode Q4_1: 4 bits and a minimum."""
    return Integers(bits_of(blocks[:, 4:], 16, 4), 0, half_of(blocks, 0), -half_of(blocks, 2))


def q5_0(blocks: torch.Tensor) -> Integers:
    """Decode Q5_0: 5 bits, zero point 16; the fifth bits are 32 separate bits."""
    return Integers(_five(blocks[:, 2:6], blocks[:, 6:]), 16, half_of(blocks, 0))


def q5_1(blocks: torch.Tensor) -> Integers:
    """Decode Q5_1: 5 bits and a minimum."""
    return Integers(_five(blocks[:, 4:8], blocks[:, 8:]), 0, half_of(blocks, 0), -half_of(blocks, 2))


def q8_0(blocks: torch.Tensor) -> Integers:
    """Decode Q8_0: signed 8 bits."""
    return Integers(blocks[:, 2:] ^ 128, 128, half_of(blocks, 0))


def q8_k(blocks: torch.Tensor) -> Integers:
    """Decode Q8_K: signed 8 bits with a float32 scale; trailing group sums are ignored."""
    return Integers(blocks[:, 4:260] ^ 128, 128, blocks[:, :4].contiguous().view(torch.float32))


def q2_k(blocks: torch.Tensor) -> Integers:
    """Decode Q2_K: 2 bits in groups of 16, each with a 4-bit scale and minimum."""
    scales = blocks[:, :16]
    scale = half_of(blocks, 80) * (scales & 15).float()
    least = half_of(blocks, 82) * (scales >> 4).float()
    return Integers(bits_of(blocks[:, 16:80], 32, 2), 0, scale, least)


def q3_k(blocks: torch.Tensor) -> Integers:
    """Decode Q3_K: 3 bits in groups of 16, each with a 6-bit scale; a clear third bit subtracts 4."""
    thirds, lows, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = bits_of(packed[:, :8], 8, 4) | bits_of(packed[:, 8:], 4, 2) << 4
    codes = bits_of(lows, 32, 2) | bits_of(thirds, 32, 1) << 2
    return Integers(codes, 4, half_of(blocks, 108) * (scales.float() - 32))


def tq1_0(blocks: torch.Tensor) -> Integers:
    """Decode TQ1_0: ternary values, five base-3 digits of a fraction in a byte; the last bytes have four."""
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    codes = [(run[:, None] * _POWERS_OF_3[:count, None]).int() * 3 >> 8 for run, count in runs]
    return Integers(torch.cat([each.flatten(1) for each in codes], 1).to(torch.uint8), 1, half_of(blocks, 52))


def tq2_0(blocks: torch.Tensor) -> Integers:
    """Decode TQ2_0: ternary values in 2 bits."""
    return Integers(bits_of(blocks[:, :64], 32, 2), 1, half_of(blocks, 64))


def q4_k(blocks: torch.Tensor) -> Integers:
    """Decode Q4_K: 4 bits in groups of 32, each with a 6-bit scale and minimum."""
    return _with_minima(blocks, bits_of(blocks[:, 16:], 32, 4))


def q5_k(blocks: torch.Tensor) -> Integers:
    """Decode Q5_K: 5 bits, otherwise as `q4_k`."""
    return _with_minima(blocks, bits_of(blocks[:, 48:], 32, 4) | bits_of(blocks[:, 16:48], 32, 1) << 4)


def q6_k(blocks: torch.Tensor) -> Integers:
    """Decode Q6_K: 6 bits, zero point 32, in groups of 16, each with an 8-bit scale."""
    codes = bits_of(blocks[:, :128], 64, 4) | bits_of(blocks[:, 128:192], 32, 2) << 4
    return Integers(
        codes, 32, half_of(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    )


def iq4_nl(blocks: torch.Tensor) -> Integers:
    """Decode IQ4_NL: 4-bit indices into `NL4`."""
    return Integers(_chosen(bits_of(blocks[:, 2:], 16, 4)), 128, half_of(blocks, 0))


def iq4_xs(blocks: torch.Tensor) -> Integers:
    """Decode IQ4_XS: 4-bit indices into `NL4`, in groups of 32, each with a 6-bit scale."""
    highs, lows = blocks[:, 2:4], blocks[:, 4:8]
    scales = bits_of(lows, 1, 4) | bits_of(highs, 1, 2) << 4
    return Integers(_chosen(bits_of(blocks[:, 8:], 16, 4)), 128, half_of(blocks, 0) * (scales.float() - 32))


def _five(fifths: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """Return 5-bit values: 32 fifth bits in order, and lower four bits of 16 values below those of the other 16."""
    return bits_of(lows, 16, 4) | bits_of(fifths, 1, 1) << 4


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> Integers:
    """Return codes in groups of 32 with k-quant scales and minima: 6 bits each, 8 of each kind in 12 bytes.

    The first four scales are in the low 6 bits of bytes 0 to 3, the first four minima in bytes 4 to 7. Of the others,
    bytes 8 to 11 hold the low 4 bits and the top 2 bits of the first eight bytes the high 2.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)
    return Integers(codes, 0, half_of(blocks, 0) * scales.float(), half_of(blocks, 2) * minima.float())


def _chosen(places: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([each + 128 for each in NL4], dtype=torch.uint8, device=places.device)
    return table[places.int()]


INTEGERS: dict[str, Callable[[torch.Tensor], Integers]] = {
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_K": q8_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}
"""Keyed by type name."""


_CHUNK_BYTES = 1 << 22
"""Bytes dequantized at a time; intermediates fit in a cache."""


def dequantize(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Dequantize contiguous blocks to ``out``, flat and of any floating-point format."""
    if kind.name in PLAIN:
        out.copy_(raw.view(PLAIN[kind.name]))
        return
    step = max(1, _CHUNK_BYTES // kind.block_bytes)
    blocks, numbers = raw.view(-1, kind.block_bytes), out.view(-1, kind.block)
    for begin in range(0, len(blocks), step):
        some = blocks[begin : begin + step]
        numbers[begin : begin + step] = (
            INTEGERS[kind.name](some).floats() if kind.name in INTEGERS else _by_package(kind.name, some)
        )


def _by_package(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize with the ``gguf`` package: types that the kernels do not multiply."""
    import gguf  # slow, and rarely needed

    with np.errstate(all="ignore"):  # scales may be infinite
        values = gguf.dequantize(blocks.reshape(1, -1).numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(values).view(len(blocks), -1)
