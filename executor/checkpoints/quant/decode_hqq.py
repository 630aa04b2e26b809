"""Decode HQQ's tensors to rows; see `quintet.executor.checkpoints.quant.formats.hqq`.

With n lines of codes and m codes in a word, word i of a column packs lines i, i + n / m, i + 2 n / m and so on, the
first in the highest bits. A 32-bit word has ten 3-bit codes in its low 30 bits; lines are padded to a multiple of
ten.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quintet.executor.checkpoints.quant.decode import Coded
from quintet.executor.checkpoints.quant.formats.hqq import IN_WORD
from quintet.executor.checkpoints.quant.formats.scheme import Scheme


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `quintet.executor.checkpoints.quant.decode.Decoder`."""
    assert scheme.codes is not None
    bits = scheme.codes.bits
    packed, scales, zeros = (tensors[each.ending] for each in scheme.stored)
    packed = packed.view(torch.int32 if bits == 3 else torch.uint8)
    first, last = begin * depth, end * depth  # indices of the flattened weight, row-major
    width = packed.shape[1]
    lines = range(first // width, -(-last // width))
    skipped = first - lines.start * width
    codes = _lines(packed, bits, lines).flatten()[skipped : skipped + last - first].view(end - begin, depth)
    if scheme.group != 1:
        mine = torch.arange(first // width, last // width)
    else:  # one scale for each line or column
        numbers = torch.arange(first, last)
        mine = numbers % width if scales.shape[0] == 1 else numbers // width
    groups = (end - begin, -1)
    its_scales, its_zeros = (each.flatten()[mine].float().view(groups) for each in (scales, zeros))
    return Coded(codes, its_scales, its_zeros, 0, scheme.group)


def _lines(packed: torch.Tensor, bits: int, wanted: range) -> torch.Tensor:
    """Return a range of lines of codes, uint8 ``[lines, width]``."""
    count, in_part, found = IN_WORD[bits], len(packed), []
    for part in range(wanted.start // in_part, -(-wanted.stop // in_part)):
        begin, end = (max(0, min(in_part, each - part * in_part)) for each in (wanted.start, wanted.stop))
        codes = packed[begin:end] >> (count - 1 - part) * bits
        found.append((codes & ((1 << bits) - 1)).to(torch.uint8))
    return torch.cat(found)
