"""From GGML's blocks to the numbers that they stand for, in float32, rounded as the format's reference rounds them.

Each function takes the bytes of blocks, ``[num_blocks, block_bytes]``, and returns their numbers, ``[num_blocks, block]``.
Format: the structs of ggml-common.h in ggml-org/llama.cpp, and what reads them in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.gguf import dequantize_iq as iq
from quintet.executor.gguf.blocks import bits_of, half_of
from quintet.executor.gguf.types import GgmlType

NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 4 bits of IQ4 stand for."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What those of MXFP4 do, doubled (OCP Microscaling Formats 1.0, section 5.3.3)."""
_CHUNK_BYTES = 1 << 22
"""Dequantized at a time: what is between fits in a cache."""


def dequantize(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Write the numbers of blocks, bytes one after another, to ``out``, flat and of any floating format."""
    if kind.name in PLAIN:
        out.copy_(raw.view(PLAIN[kind.name]))
        return
    read, step = READERS[kind.name], max(1, _CHUNK_BYTES // kind.block_bytes)
    blocks, numbers = raw.view(-1, kind.block_bytes), out.view(-1, kind.block)
    for begin in range(0, len(blocks), step):
        numbers[begin : begin + step] = read(blocks[begin : begin + step])


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """4 bits, centred on 8."""
    return half_of(blocks, 0) * (bits_of(blocks[:, 2:], 16, 4).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """4 bits and a minimum."""
    return half_of(blocks, 0) * bits_of(blocks[:, 4:], 16, 4).float() + half_of(blocks, 2)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """5 bits, centred on 16: the fifth bits are 32 of their own."""
    return half_of(blocks, 0) * (_five(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """5 bits and a minimum."""
    return half_of(blocks, 0) * _five(blocks[:, 4:8], blocks[:, 8:]).float() + half_of(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """8 bits."""
    return half_of(blocks, 0) * _signed(blocks[:, 2:])


def q8_k(blocks: torch.Tensor) -> torch.Tensor:
    """8 bits with a scale of 32; sums of groups are behind, for products."""
    return blocks[:, :4].contiguous().view(torch.float32) * _signed(blocks[:, 4:260])


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """2 bits in groups of 16, each with a scale and a minimum of 4 bits."""
    scales = blocks[:, :16]
    scale = half_of(blocks, 80) * (scales & 15).float()
    least = half_of(blocks, 82) * (scales >> 4).float()
    numbers = bits_of(blocks[:, 16:80], 32, 2).view(-1, 16, 16).float()
    return (scale[..., None] * numbers - least[..., None]).flatten(1)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """3 bits in groups of 16, each with a scale of 6 bits; a third bit that is clear takes 4 away."""
    thirds, lows, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = bits_of(packed[:, :8], 8, 4) | bits_of(packed[:, 8:], 4, 2) << 4
    numbers = bits_of(lows, 32, 2).float() + 4 * bits_of(thirds, 32, 1).float() - 4
    scale = half_of(blocks, 108) * (scales.float() - 32)
    return (scale[..., None] * numbers.view(-1, 16, 16)).flatten(1)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """4 bits in groups of 32, each with a scale and a minimum of 6 bits."""
    return _with_minima(blocks, bits_of(blocks[:, 16:], 32, 4))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """5 bits, otherwise as `q4_k`."""
    return _with_minima(blocks, bits_of(blocks[:, 48:], 32, 4) | bits_of(blocks[:, 16:48], 32, 1) << 4)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """6 bits, centred on 32, in groups of 16, each with a scale of 8 bits."""
    numbers = bits_of(blocks[:, :128], 64, 4) | bits_of(blocks[:, 128:192], 32, 2) << 4
    scale = half_of(blocks, 208) * _signed(blocks[:, 192:208])
    return (scale[..., None] * (numbers.view(-1, 16, 16).float() - 32)).flatten(1)


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """4 bits that choose from `NL4`."""
    return half_of(blocks, 0) * _chosen(NL4, bits_of(blocks[:, 2:], 16, 4))


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """4 bits that choose from `NL4`, in groups of 32, each with a scale of 6 bits."""
    highs, lows = blocks[:, 2:4], blocks[:, 4:8]
    scales = bits_of(lows, 1, 4) | bits_of(highs, 1, 2) << 4
    scale = half_of(blocks, 0) * (scales.float() - 32)
    return (scale[..., None] * _chosen(NL4, bits_of(blocks[:, 8:], 16, 4)).view(-1, 8, 32)).flatten(1)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits with a power of two."""
    exponent = blocks[:, :1].int()
    # Half of the power: E2M1 is doubled.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _chosen(E2M1, bits_of(blocks[:, 1:], 16, 4))


def _signed(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.int8).float()


def _five(fifths: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """Return numbers of 5 bits: 32 fifth bits in order, and the lower four of 16 numbers below those of 16 others."""
    return bits_of(lows, 16, 4) | bits_of(fifths, 1, 1) << 4


def _with_minima(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in groups of 32 with the scales and minima of k-quants: 6 bits each, 8 of either in 12 bytes.

    The first four of each lie in the low 6 bits of bytes 0 to 3, and 4 to 7. Of the others bytes 8 to 11 have the low 4 bits,
    side by side, and the first eight bytes the high 2.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)
    scale, least = half_of(blocks, 0) * scales.float(), half_of(blocks, 2) * minima.float()
    return (scale[..., None] * numbers.view(-1, 8, 32).float() - least[..., None]).flatten(1)


def _chosen(table: tuple[int, ...], numbers: torch.Tensor) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32)[numbers.int()]


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    "IQ1_S": iq.iq1_s,
    "IQ1_M": iq.iq1_m,
    "IQ2_XXS": iq.iq2_xxs,
    "IQ2_XS": iq.iq2_xs,
    "IQ2_S": iq.iq2_s,
    "IQ3_XXS": iq.iq3_xxs,
    "IQ3_S": iq.iq3_s,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
"""By the name of the type."""
