"""GGML's blocks as integers, scales and minima, for the types whose numbers are those.

Each function takes the bytes of blocks, ``[num_blocks, block_bytes]``. Format: the structs of ggml-common.h in
ggml-org/llama.cpp, and what reads them in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quintet.executor.checkpoints.gguf.blocks.bits import bits_of, half_of

NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 4 bits of IQ4 stand for."""
_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
"""What brings a digit to base 3 to the front: what is before it is lost beyond 8 bits."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Numbers of blocks: ``(code - zero) * scale - least``, rounded in float32 as the format's reference rounds them."""

    codes: torch.Tensor
    """uint8 ``[num_blocks, numbers of a block]``."""
    zero: int
    scales: torch.Tensor
    """fp32 ``[num_blocks, groups]``: neighbouring numbers share one."""
    minima: torch.Tensor | None = None
    """Likewise."""

    def floats(self) -> torch.Tensor:
        """Return the numbers, fp32 ``[num_blocks, numbers of a block]``."""
        groups = self.codes.float().view(len(self.codes), self.scales.shape[1], -1)
        numbers = (groups - self.zero) * self.scales[..., None]
        return (numbers if self.minima is None else numbers - self.minima[..., None]).flatten(1)


def q4_0(blocks: torch.Tensor) -> Integers:
    """4 bits, centred on 8."""
    return Integers(bits_of(blocks[:, 2:], 16, 4), 8, half_of(blocks, 0))


def q4_1(blocks: torch.Tensor) -> Integers:
    """4 bits and a minimum."""
    return Integers(bits_of(blocks[:, 4:], 16, 4), 0, half_of(blocks, 0), -half_of(blocks, 2))


def q5_0(blocks: torch.Tensor) -> Integers:
    """5 bits, centred on 16: the fifth bits are 32 of their own."""
    return Integers(_five(blocks[:, 2:6], blocks[:, 6:]), 16, half_of(blocks, 0))


def q5_1(blocks: torch.Tensor) -> Integers:
    """5 bits and a minimum."""
    return Integers(_five(blocks[:, 4:8], blocks[:, 8:]), 0, half_of(blocks, 0), -half_of(blocks, 2))


def q8_0(blocks: torch.Tensor) -> Integers:
    """8 bits with a sign."""
    return Integers(blocks[:, 2:] ^ 128, 128, half_of(blocks, 0))


def q2_k(blocks: torch.Tensor) -> Integers:
    """2 bits in groups of 16, each with a scale and a minimum of 4 bits."""
    scales = blocks[:, :16]
    scale = half_of(blocks, 80) * (scales & 15).float()
    least = half_of(blocks, 82) * (scales >> 4).float()
    return Integers(bits_of(blocks[:, 16:80], 32, 2), 0, scale, least)


def q3_k(blocks: torch.Tensor) -> Integers:
    """3 bits in groups of 16, each with a scale of 6 bits; a third bit that is clear takes 4 away."""
    thirds, lows, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = bits_of(packed[:, :8], 8, 4) | bits_of(packed[:, 8:], 4, 2) << 4
    codes = bits_of(lows, 32, 2) | bits_of(thirds, 32, 1) << 2
    return Integers(codes, 4, half_of(blocks, 108) * (scales.float() - 32))


def tq1_0(blocks: torch.Tensor) -> Integers:
    """Three values, five in a byte as a fraction whose digits they are, to base 3: the last bytes have four."""
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    codes = [(run[:, None] * _POWERS_OF_3[:count, None]).int() * 3 >> 8 for run, count in runs]
    return Integers(torch.cat([each.flatten(1) for each in codes], 1).to(torch.uint8), 1, half_of(blocks, 52))


def tq2_0(blocks: torch.Tensor) -> Integers:
    """Three values in 2 bits."""
    return Integers(bits_of(blocks[:, :64], 32, 2), 1, half_of(blocks, 64))


def q4_k(blocks: torch.Tensor) -> Integers:
    """4 bits in groups of 32, each with a scale and a minimum of 6 bits."""
    return _with_minima(blocks, bits_of(blocks[:, 16:], 32, 4))


def q5_k(blocks: torch.Tensor) -> Integers:
    """5 bits, otherwise as `q4_k`."""
    return _with_minima(blocks, bits_of(blocks[:, 48:], 32, 4) | bits_of(blocks[:, 16:48], 32, 1) << 4)


def q6_k(blocks: torch.Tensor) -> Integers:
    """6 bits, centred on 32, in groups of 16, each with a scale of 8 bits."""
    codes = bits_of(blocks[:, :128], 64, 4) | bits_of(blocks[:, 128:192], 32, 2) << 4
    return Integers(
        codes, 32, half_of(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    )


def iq4_nl(blocks: torch.Tensor) -> Integers:
    """4 bits that choose from `NL4`."""
    return Integers(_chosen(bits_of(blocks[:, 2:], 16, 4)), 128, half_of(blocks, 0))


def iq4_xs(blocks: torch.Tensor) -> Integers:
    """4 bits that choose from `NL4`, in groups of 32, each with a scale of 6 bits."""
    highs, lows = blocks[:, 2:4], blocks[:, 4:8]
    scales = bits_of(lows, 1, 4) | bits_of(highs, 1, 2) << 4
    return Integers(_chosen(bits_of(blocks[:, 8:], 16, 4)), 128, half_of(blocks, 0) * (scales.float() - 32))


def _five(fifths: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """Return numbers of 5 bits: 32 fifth bits in order, and the lower four of 16 numbers below those of 16 others."""
    return bits_of(lows, 16, 4) | bits_of(fifths, 1, 1) << 4


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> Integers:
    """Return codes in groups of 32 with the scales and minima of k-quants: 6 bits each, 8 of either in 12 bytes.

    The first four of each lie in the low 6 bits of bytes 0 to 3, and 4 to 7. Of the others bytes 8 to 11 have the low 4 bits,
    side by side, and the first eight bytes the high 2.
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
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}
"""By the name of the type."""
