"""Decoders of checkpoint formats that are not scales, zero points and packed codes alone.

Each is a `quintet.executor.checkpoints.quant.decode.Decoder`, named by `Scheme.decoder` of its format in
`quintet.executor.checkpoints.quant.formats`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quintet.executor.backends.cpu.ops.packed_tables import TABLE_SIZE, Outliers
from quintet.executor.checkpoints.quant.decode import Coded, unpacked
from quintet.executor.checkpoints.quant.formats.bitsandbytes import TABLES
from quintet.executor.checkpoints.quant.formats.hqq import IN_WORD
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError

_BITNET_ZERO = 1
_TORCHAO_MIDDLE = 8
Tensors = Mapping[str, torch.Tensor]


def bitnet(scheme: Scheme, tensors: Tensors, depth: int, begin: int, end: int) -> Coded:
    """Two bits a code; byte i has rows i, i + rows / 4 and so on."""
    packed, scale = (tensors[each.ending] for each in scheme.stored)
    codes = _lines(packed, 2, range(begin, end), [0, 2, 4, 6])
    if bool((codes == 3).any()):
        raise ConfigError("the weight has the invalid code 3: download the checkpoint again")
    one = scale.float().reshape(1, 1)
    return Coded(codes, (1 / one if scheme.divides else one).expand(end - begin, 1), None, _BITNET_ZERO, 0)


def bitsandbytes(scheme: Scheme, tensors: Tensors, depth: int, begin: int, end: int) -> Coded:
    """Four bits a code, and a table of their values; the scales may be quantized too."""
    octets = tensors["weight"].flatten()[begin * depth // 2 : end * depth // 2]
    codes = torch.stack((octets >> 4, octets & 15), dim=1).view(end - begin, depth)
    groups = depth // scheme.group
    absmax = tensors["weight.absmax"][begin * groups : end * groups]
    if absmax.dtype is torch.uint8:
        state = _quant_state(tensors)
        size = state.get("nested_blocksize", 256)
        offset = state.get("nested_offset")
        if size != 256 or not isinstance(offset, float):
            raise ConfigError(
                f"quant_state has nested_blocksize {size!r:.40} (must be 256) and nested_offset {offset!r:.40} (must be a float)"
            )
        of_block = torch.arange(begin * groups, end * groups) // 256
        absmax = (
            tensors["weight.nested_quant_map"][absmax.int()] * tensors["weight.nested_absmax"][of_block]
            + offset
        )
    known = torch.tensor(TABLES[scheme.table])
    table = tensors.get("weight.quant_map", known)  # dummy weights have none
    if not torch.allclose(table.float(), known, rtol=0, atol=1e-6):
        raise ConfigError(
            f"weight.quant_map is not the table of {scheme.table}: download the checkpoint again"
        )
    return Coded(
        codes,
        absmax.float().view(end - begin, groups),
        None,
        0,
        scheme.group,
        table=known,
    )


def _quant_state(tensors: Tensors) -> dict[str, object]:
    for ending, tensor in tensors.items():
        if "quant_state" in ending:
            try:
                state = json.loads(bytes(tensor.tolist()))
            except ValueError:
                break
            if isinstance(state, dict):
                return state
    raise ConfigError(
        "no readable weight.quant_state (the quantization of the scales): download the checkpoint again"
    )


def hqq(scheme: Scheme, tensors: Tensors, depth: int, begin: int, end: int) -> Coded:
    """Codes of distant lines in one word.

    With n lines of codes and m codes in a word, word i of a column packs lines i, i + n / m, i + 2 n / m and so on, the first in
    the highest bits. A 32-bit word has ten 3-bit codes in its low 30 bits; lines are padded to a multiple of ten.
    """
    assert scheme.codes is not None
    bits = scheme.codes.bits
    packed, scales, zeros = (tensors[each.ending] for each in scheme.stored)
    packed = packed.view(torch.int32 if bits == 3 else torch.uint8)
    first, last = begin * depth, end * depth  # indices of the flattened weight, row-major
    width = packed.shape[1]
    lines = range(first // width, -(-last // width))
    skipped = first - lines.start * width
    shifts = range(0, IN_WORD[bits] * bits, bits)[::-1]
    codes = (
        _lines(packed, bits, lines, shifts)
        .flatten()[skipped : skipped + last - first]
        .view(end - begin, depth)
    )
    if scheme.group != 1:
        mine = torch.arange(first // width, last // width)
    else:  # one scale for each line or column
        numbers = torch.arange(first, last)
        mine = numbers % width if scales.shape[0] == 1 else numbers // width
    groups = (end - begin, -1)
    its_scales, its_zeros = (each.flatten()[mine].float().view(groups) for each in (scales, zeros))
    return Coded(codes, its_scales, its_zeros, 0, scheme.group)


def _lines(packed: torch.Tensor, bits: int, wanted: range, shifts: Sequence[int]) -> torch.Tensor:
    """Return a range of lines of codes, uint8 ``[lines, width]``; ``shifts``: place of each distant line in a word."""
    in_part, found = len(packed), []
    for part in range(wanted.start // in_part, -(-wanted.stop // in_part)):
        begin, end = (max(0, min(in_part, each - part * in_part)) for each in (wanted.start, wanted.stop))
        codes = packed[begin:end] >> shifts[part]
        found.append((codes & ((1 << bits) - 1)).to(torch.uint8))
    return torch.cat(found)


def squeezellm(scheme: Scheme, tensors: Tensors, depth: int, begin: int, end: int) -> Coded:
    """A table for each row, and sparse outliers that are added."""
    assert scheme.codes is not None
    codes = unpacked(scheme.codes, tensors["qweight"], range(begin, end), depth)
    tables = tensors["lookup_table"][begin:end].float()
    tables = torch.nn.functional.pad(tables, (0, TABLE_SIZE - tables.shape[1]))
    coded = Coded(codes, torch.ones(end - begin, 1), None, 0, 0, row_tables=tables)
    added = []
    if "rows" in tensors:
        added.append(_outliers(tensors, depth, begin, end))
    if "full_rows" in tensors:
        for i, row in enumerate(tensors["full_row_indices"].tolist()):
            if begin <= row < end:
                whole = torch.full((depth,), row - begin), torch.arange(depth), tensors["full_rows"][:, i]
                added.append(whole)
    if not added:
        return coded
    rows, inputs, numbers = (torch.cat(each) for each in zip(*added, strict=True))
    order = rows.argsort(stable=True)
    order = order[numbers[order] != 0]  # inputs of other ranks are zeroed
    begins = torch.searchsorted(rows[order], torch.arange(end - begin + 1))
    return replace(coded, outliers=Outliers(begins, inputs[order], numbers[order]))


def _outliers(
    tensors: Tensors, depth: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row offsets, input indices and values of the sparse outliers."""
    ends, columns = tensors["rows"][begin : end + 1].long(), tensors["cols"]
    counts = ends.diff()
    first, last = int(ends[0]), int(ends[-1])
    if first < 0 or last > len(columns) or bool((counts < 0).any()):
        raise ConfigError(
            f"the row pointers of the {len(columns)} outliers are invalid: download the checkpoint again"
        )
    mine = columns[first:last].long()
    if len(mine) and (int(mine.min()) < 0 or int(mine.max()) >= depth):
        raise ConfigError(
            f"cols has inputs {int(mine.min())} to {int(mine.max())} of {depth}: download the checkpoint again"
        )
    return torch.repeat_interleave(torch.arange(end - begin), counts), mine, tensors["vals"][first:last]


def torchao_int4(scheme: Scheme, tensors: Tensors, depth: int, begin: int, end: int) -> Coded:
    """Signed 4-bit codes with fractional zero points."""
    assert scheme.codes is not None
    packed, scales, added = (tensors[each.ending] for each in scheme.stored[:3])
    codes = unpacked(scheme.codes, packed, range(begin, end), depth) ^ _TORCHAO_MIDDLE  # signed 4-bit codes
    scales, added = (each[:, begin:end].t().float() for each in (scales, added))
    if bool(((scales == 0) & (added != 0)).any()):
        raise ConfigError("a scale is 0 but its zero point is not: quantize the model again")
    zeros = _TORCHAO_MIDDLE - torch.where(scales == 0, 0.0, added / scales)
    return Coded(codes, scales.contiguous(), zeros.contiguous(), 0, scheme.group)
