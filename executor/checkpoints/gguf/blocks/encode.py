"""Quantize values to GGML blocks; inverse of `quintet.executor.checkpoints.gguf.blocks.dequantize`, with our own scale search.

Each function of a type takes blocks of values, float32 ``[num_blocks, block]``, and returns bytes, ``[num_blocks,
block_bytes]``.

k-quants are blocks of 256 in groups of 16 or 32, with integer group scales (and minima) times a block scale.
`quintet.executor.checkpoints.gguf.blocks.scale_search` finds the groups' scales. Each is rounded to the best of the
three nearest integers. A least-squares solution for the block scale with fixed codes follows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.checkpoints.gguf.blocks.bits import as_half, bits_in, bytes_of_half
from quintet.executor.checkpoints.gguf.blocks.dequantize import NL4, PLAIN
from quintet.executor.checkpoints.gguf.blocks.scale_search import TINY, Levels, fit_affine, fit_scale, safe
from quintet.executor.checkpoints.gguf.types import GgmlType

CHUNK = 1 << 16
"""Values encoded at a time; intermediates fit in an L2 cache."""
_NEAR = (-1.0, 0.0, 1.0)


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
    scale, codes = _scaled_block(x, Levels(-8, 7))
    return torch.cat([bytes_of_half(scale), bits_in(codes, 16, 4)], 1)


def q5_0(x: torch.Tensor) -> torch.Tensor:
    """Encode Q5_0: 5 bits, zero point 16."""
    scale, codes = _scaled_block(x, Levels(-16, 15))
    return torch.cat([bytes_of_half(scale), bits_in(codes >> 4, 1, 1), bits_in(codes & 15, 16, 4)], 1)


def iq4_nl(x: torch.Tensor) -> torch.Tensor:
    """Encode IQ4_NL: 4-bit indices into `NL4`."""
    scale, codes = _scaled_block(x, Levels(NL4[0], NL4[-1], NL4))
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


def _scaled_block(x: torch.Tensor, levels: Levels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks, fp16 values ``[num_blocks, 1]``, and their codes."""
    scale = as_half(fit_scale(x.t().contiguous(), levels))[:, None]
    return scale, levels.codes(x / safe(scale)).to(torch.uint8)


def _with_minimum(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales and minima, fp16 values ``[num_blocks, 1]``, and codes."""
    shift = x.amin(1, keepdim=True).clamp_min(0)  # for blocks without negative values
    scale, minimum = fit_affine((x - shift).t().contiguous(), most)
    scale, least = as_half(scale)[:, None], as_half(shift - minimum[:, None])
    return scale, least, ((x - least) / safe(scale)).round_().clamp_(0, most).to(torch.uint8)


def q6_k(x: torch.Tensor) -> torch.Tensor:
    """Encode Q6_K: 6 bits in groups of 16, 8-bit scales."""
    scale, scales, codes = _scaled(x, 16, Levels(-32, 31), 128)
    lows, highs = bits_in(codes & 15, 64, 4), bits_in(codes >> 4, 32, 2)
    return torch.cat([lows, highs, scales.to(torch.int8).view(torch.uint8), bytes_of_half(scale)], 1)


def q3_k(x: torch.Tensor) -> torch.Tensor:
    """Encode Q3_K: 3 bits in groups of 16, 6-bit scales."""
    scale, scales, codes = _scaled(x, 16, Levels(-4, 3), 32)
    stored = (scales + 32).to(torch.uint8)
    packed = torch.cat([bits_in(stored & 15, 8, 4), bits_in(stored >> 4, 4, 2)], 1)
    return torch.cat([bits_in(codes >> 2, 32, 1), bits_in(codes & 3, 32, 2), packed, bytes_of_half(scale)], 1)


def iq4_xs(x: torch.Tensor) -> torch.Tensor:
    """Encode IQ4_XS: 4-bit indices into `NL4`, in groups of 32, 6-bit scales."""
    scale, scales, codes = _scaled(x, 32, Levels(NL4[0], NL4[-1], NL4), 32)
    stored = (scales + 32).to(torch.uint8)
    highs, lows = bits_in(stored >> 4, 1, 2), bits_in(stored & 15, 1, 4)
    return torch.cat([bytes_of_half(scale), highs, lows, bits_in(codes, 16, 4)], 1)


def q4_k(x: torch.Tensor) -> torch.Tensor:
    """Encode Q4_K: 4 bits in groups of 32, 6-bit scales and minima."""
    factors, scales, minima, codes = _with_minima(x, 32, 15, 63)
    return torch.cat([factors, _six_bits(scales, minima), bits_in(codes, 32, 4)], 1)


def q5_k(x: torch.Tensor) -> torch.Tensor:
    """Encode Q5_K: 5 bits, otherwise as `q4_k`."""
    factors, scales, minima, codes = _with_minima(x, 32, 31, 63)
    fifths, lows = bits_in(codes >> 4, 32, 1), bits_in(codes & 15, 32, 4)
    return torch.cat([factors, _six_bits(scales, minima), fifths, lows], 1)


def q2_k(x: torch.Tensor) -> torch.Tensor:
    """Encode Q2_K: 2 bits in groups of 16, 4-bit scales and minima."""
    factors, scales, minima, codes = _with_minima(x, 16, 3, 15)
    return torch.cat([scales | minima << 4, bits_in(codes, 32, 2), factors], 1)


def _six_bits(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Pack 8 scales and 8 minima into 12 bytes; see `quintet.executor.checkpoints.gguf.blocks.dequantize`."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return torch.cat([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], 1)


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return groups as columns ``[size, groups]``."""
    return x.reshape(-1, size).t().contiguous()


def _each(block: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat a block's value for each of its groups ``[num_blocks * groups]``."""
    return block.repeat_interleave(groups)


def _scaled(
    x: torch.Tensor, size: int, levels: Levels, limit: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return block scales, fp16 values ``[num_blocks, 1]``, integer scales of the groups, and codes.

    limit: group scales are in ``[-limit, limit - 1]``.
    """
    count, columns = x.shape[1] // size, _grouped(x, size)
    wanted = fit_scale(columns, levels).view(-1, count)
    extreme = wanted.gather(1, wanted.abs().argmax(1, keepdim=True)).squeeze(1)
    scale = as_half(extreme / -limit)
    scales = _nearest_scales(columns, wanted.view(-1), _each(scale, count), levels, limit)
    for _ in range(2):
        rounded = scales * levels.nearest(columns / safe(_each(scale, count) * scales))
        product = (columns * rounded).sum(0).view(-1, count).sum(1)
        square = rounded.square().sum(0).view(-1, count).sum(1)
        scale = as_half(product / square.clamp_min(TINY))
    codes = levels.codes(columns / safe(_each(scale, count) * scales)).to(torch.uint8)
    return scale[:, None], scales.view(-1, count), codes.t().reshape(len(x), -1)


def _nearest_scales(
    columns: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, levels: Levels, limit: int
) -> torch.Tensor:
    """Return the integer scale of each group with the least error."""
    middle = (wanted / safe(scale)).round_()
    best, least = middle, torch.full_like(middle, torch.inf)
    for offset in _NEAR:
        tried = (middle + offset).clamp_(-limit, limit - 1)
        whole = scale * tried
        error = (levels.nearest(columns / safe(whole)) * whole - columns).square_().sum(0)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _with_minima(
    x: torch.Tensor, size: int, most: int, limit: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both fp16 factors of each block as bytes, integer scales and minima of the groups, and codes."""
    count, columns = x.shape[1] // size, _grouped(x, size)
    wanted, lows = fit_affine(columns, most)
    scale, low = (as_half(each.view(-1, count).amax(1) / limit) for each in (wanted, lows))
    scales, minima = _nearest_pairs(
        columns, (wanted, lows), (_each(scale, count), _each(low, count)), most, limit
    )
    for _ in range(2):
        codes = _codes(columns, _each(scale, count) * scales, _each(low, count) * minima, most)
        scale, low = _solved(columns, codes * scales, minima, count)
    codes = _codes(columns, _each(scale, count) * scales, _each(low, count) * minima, most).to(torch.uint8)
    factors = torch.cat([bytes_of_half(scale[:, None]), bytes_of_half(low[:, None])], 1)
    whole = [each.to(torch.uint8).view(-1, count) for each in (scales, minima)]
    return factors, whole[0], whole[1], codes.t().reshape(len(x), -1)


def _codes(columns: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, most: int) -> torch.Tensor:
    return ((columns + low) / safe(scale)).round_().clamp_(0, most)


def _nearest_pairs(
    columns: torch.Tensor,
    wanted: tuple[torch.Tensor, torch.Tensor],
    factors: tuple[torch.Tensor, torch.Tensor],
    most: int,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integer scale and minimum of each group with the least error."""
    middles = [(each / safe(factor)).round_() for each, factor in zip(wanted, factors, strict=True)]
    best = (middles[0], middles[1])
    least = torch.full_like(best[0], torch.inf)
    for of_scale in _NEAR:
        for of_low in _NEAR:
            tried = (middles[0] + of_scale).clamp_(0, limit), (middles[1] + of_low).clamp_(0, limit)
            scale, low = factors[0] * tried[0], factors[1] * tried[1]
            error = (_codes(columns, scale, low, most) * scale - low - columns).square_().sum(0)
            better = error < least
            best = torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1])
            least = torch.minimum(error, least)
    return best


def _solved(
    columns: torch.Tensor, scaled: torch.Tensor, minima: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve the two normal equations for each block's scale and factor of minima in ``scale * scaled - low * minima``."""

    def of_block(each: torch.Tensor) -> torch.Tensor:
        return each.view(-1, count).sum(1)

    sum_scaled, sum_x = scaled.sum(0), columns.sum(0)
    aa, ab = of_block(scaled.square().sum(0)), of_block(sum_scaled * minima)
    bb = of_block(minima.square()) * len(columns)
    ax, bx = of_block((columns * scaled).sum(0)), of_block(sum_x * minima)
    determinant = aa * bb - ab.square()
    solvable = determinant > 1e-6 * aa * bb
    alone = -bx / bb.clamp_min(TINY)
    low = as_half(torch.where(solvable, (ab * ax - aa * bx) / determinant, alone).clamp_min(0))
    return as_half(((ax + ab * low) / aa.clamp_min(TINY)).clamp_min(0)), low


WRITERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "IQ4_NL": iq4_nl,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_XS": iq4_xs,
}
"""Keyed by type name."""
