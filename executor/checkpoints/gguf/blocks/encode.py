"""Quantize values to GGML blocks; inverse of `quintet.executor.checkpoints.gguf.blocks.dequantize`, with our own scale search.

Each function takes blocks of values, float32 ``[num_blocks, block]``, and returns bytes, ``[num_blocks,
block_bytes]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.checkpoints.gguf.blocks import encode_k as k
from quintet.executor.checkpoints.gguf.blocks.bits import as_half, bits_in, bytes_of_half
from quintet.executor.checkpoints.gguf.blocks.dequantize import PLAIN
from quintet.executor.checkpoints.gguf.blocks.integers import NL4
from quintet.executor.checkpoints.gguf.blocks.scale_search import Levels, fit_affine, fit_scale, safe
from quintet.executor.checkpoints.gguf.types import GgmlType

CHUNK = 1 << 16
"""Values encoded at a time; intermediates fit in an L2 cache."""


def encode(numbers: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Encode rows ``[rows, depth]`` of any floating-point format into ``out``, uint8 ``[rows, bytes of a row]``.

    Raises ValueError for values that are not finite or too large for the type.
    """
    if kind.name in PLAIN:
        dtype = PLAIN[kind.name]
        whole = numbers.to(dtype)
        if dtype is torch.float16 and not torch.equal(whole.isfinite(), numbers.isfinite()):
            raise ValueError("has values beyond the range of F16")
        out.copy_(whole.contiguous().view(torch.uint8).view(out.shape))
        return
    write = WRITERS[kind.name]
    blocks = numbers.reshape(-1, kind.block)
    target = out.view(-1, kind.block_bytes)
    step = max(1, CHUNK // kind.block)
    for begin in range(0, len(blocks), step):
        part = blocks[begin : begin + step].float()
        if not part.isfinite().all():
            raise ValueError("has values that are not finite")
        target[begin : begin + step] = write(part)


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Encode Q8_0: the largest value gets the largest code, which loses less than a search."""
    scale = as_half(x.abs().amax(1, keepdim=True) / 127)
    codes = (x / safe(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([bytes_of_half(scale), codes.view(torch.uint8)], 1)


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """Encode Q4_0: 4 bits, zero point 8."""
    scale, codes = _scaled(x, Levels(-8, 7))
    return torch.cat([bytes_of_half(scale), bits_in(codes, 16, 4)], 1)


def q5_0(x: torch.Tensor) -> torch.Tensor:
    """Encode Q5_0: 5 bits, zero point 16."""
    scale, codes = _scaled(x, Levels(-16, 15))
    return torch.cat([bytes_of_half(scale), bits_in(codes >> 4, 1, 1), bits_in(codes & 15, 16, 4)], 1)


def iq4_nl(x: torch.Tensor) -> torch.Tensor:
    """Encode IQ4_NL: 4-bit indices into `NL4`."""
    scale, codes = _scaled(x, Levels(NL4[0], NL4[-1], NL4))
    return torch.cat([bytes_of_half(scale), bits_in(codes, 16, 4)], 1)


def q4_1(x: torch.Tensor) -> torch.Tensor:
    """Encode Q4_1: 4 bits and a minimum."""
    scale, least, codes = _with_minimum(x, 15)
    return torch.cat([bytes_of_half(scale), bytes_of_half(least), bits_in(codes, 16, 4)], 1)


def q5_1(x: torch.Tensor) -> torch.Tensor:
    """Encode Q5_1: 5 bits and a minimum."""
    scale, least, codes = _with_minimum(x, 31)
    fifths, lows = bits_in(codes >> 4, 1, 1), bits_in(codes & 15, 16, 4)
    return torch.cat([bytes_of_half(scale), bytes_of_half(least), fifths, lows], 1)


def _scaled(x: torch.Tensor, levels: Levels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks, fp16 values ``[num_blocks, 1]``, and their codes."""
    scale = as_half(fit_scale(x.t().contiguous(), levels))[:, None]
    return scale, levels.codes(x / safe(scale)).to(torch.uint8)


def _with_minimum(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales and minima, fp16 values ``[num_blocks, 1]``, and codes."""
    shift = x.amin(1, keepdim=True).clamp_min(0)  # for blocks without negative values
    scale, minimum = fit_affine((x - shift).t().contiguous(), most)
    scale, least = as_half(scale)[:, None], as_half(shift - minimum[:, None])
    return scale, least, ((x - least) / safe(scale)).round_().clamp_(0, most).to(torch.uint8)


WRITERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "IQ4_NL": iq4_nl,
    "Q2_K": k.q2_k,
    "Q3_K": k.q3_k,
    "Q4_K": k.q4_k,
    "Q5_K": k.q5_k,
    "Q6_K": k.q6_k,
    "IQ4_XS": k.iq4_xs,
}
"""Keyed by type name."""
