"""From the tensors of a quantized layer to codes, scales and zeros: what `quintet.executor.quant.formats` describes, in torch.

Rows are made some at a time, so that what is unpacked stays small beside the packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from quintet.executor.quant.formats.scheme import Packing, Scheme
from quintet.wire.errors import ConfigError

ROWS_STEP = 128
"""Rows are asked for in whole steps of so many, as far as there are rows: blocks of scales and words of codes are whole then."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows of a weight, before it is decided how they are kept."""

    codes: torch.Tensor
    """``[rows, depth]``: uint8, or numbers that mean themselves."""
    scales: torch.Tensor
    """fp32 ``[rows, groups]``."""
    zeros: torch.Tensor | None
    """uint8 ``[rows, groups]``; None where every zero is `zero`."""
    zero: int
    group: int
    """Neighbouring inputs of a group; 0: all."""
    order: torch.Tensor | None = None
    """int64 ``[depth]``: the group of each input, where they are not neighbours."""
    table: torch.Tensor | None = None
    """fp32: the number that each code means."""

    def rows(self, some: range) -> Coded:
        """Return some of the rows."""
        if len(some) == len(self.codes):
            return self
        cut = slice(some.start, some.stop)
        zeros = None if self.zeros is None else self.zeros[cut]
        return replace(self, codes=self.codes[cut], scales=self.scales[cut], zeros=zeros)

    def floats(self) -> torch.Tensor:
        """Return the numbers, fp32 ``[rows, depth]``."""
        depth = self.codes.shape[1]
        if self.table is not None:
            values = self.table[self.codes.int()]
        else:
            values = self.codes.float()
            values -= self.zero if self.zeros is None else self._spread(self.zeros.float(), depth)
        return values.mul_(self._spread(self.scales, depth))

    def _spread(self, by_group: torch.Tensor, depth: int) -> torch.Tensor:
        """Return ``[rows, depth]`` of ``[rows, groups]``; ``[rows, 1]`` where there is one group."""
        if self.order is not None:
            return by_group[:, self.order]
        if by_group.shape[1] == 1:
            return by_group
        return by_group.repeat_interleave(self.group, dim=1)[:, :depth]


Decoder = Callable[[Scheme, Mapping[str, torch.Tensor], int, int, int], Coded]
"""From a scheme, its tensors by their endings, the depth, and a range of rows that begins on a multiple of `ROWS_STEP` and ends
on one or at the last row, to those rows. Raises `ConfigError` for numbers that cannot be."""


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `Decoder`."""
    first, second = (tensors[each.ending] for each in scheme.stored[:2])
    rows = range(begin, end)
    codes, zero = first[begin:end], 0
    if scheme.codes is not None:
        codes, zero = unpacked(scheme.codes, first, rows, depth), 1 << (scheme.codes.bits - 1)
    groups = -(-depth // (scheme.group or depth))
    scales = _scales(scheme, second, rows)[:, :groups]
    zeros = None
    if scheme.zeros is not None:
        zeros = unpacked(scheme.zeros, tensors[scheme.stored[2].ending], rows, groups)
        zeros = (zeros + scheme.zero_offset) & ((1 << scheme.zeros.bits) - 1)
        if scheme.all_zeros is not None:
            if bool((zeros != scheme.all_zeros).any()):
                raise ConfigError(
                    f"{scheme.stored[2].ending} has zeros other than {scheme.all_zeros}, though quantization_config says that the"
                    " weights are symmetric: download config.json again"
                )
            zeros = None
    order = None
    if scheme.order is not None:
        order = tensors[scheme.order].long()
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise ConfigError(
                f"{scheme.order} names groups from {int(order.min())} to {int(order.max())} of {groups}"
            )
    table = torch.tensor(scheme.table) if scheme.table else None
    return Coded(codes, scales, zeros, zero, scheme.group, order, table)


def unpacked(packing: Packing, tensor: torch.Tensor, rows: range, depth: int) -> torch.Tensor:
    """Return codes of some rows, uint8 ``[rows, depth]``."""
    bits, begin, end = packing.bits, rows.start, rows.stop
    if packing.neighbours == "rows":
        begin, end = begin * bits // 32, -(-end * bits // 32)
    words = tensor[:, begin:end] if packing.transposed else tensor[begin:end]
    if packing.transposed != (packing.neighbours == "rows"):
        words = words.t()  # neighbours are in the last dimension
    codes = stream(words.contiguous().view(torch.uint8), bits)
    if packing.order:
        codes = codes.unflatten(1, (-1, len(packing.order)))[:, :, list(packing.order)].flatten(1)
    if packing.neighbours == "rows":
        return codes.t()[: len(rows), :depth].contiguous()
    return codes[:, :depth]


def stream(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in bytes ``[rows, bytes]``, the first in the lowest bits: uint8 ``[rows, bytes * 8 / bits]``."""
    if bits == 8:
        return octets
    if bits == 3:
        words = octets.unflatten(1, (-1, 3)).int()
        word = words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16
        each = [(word >> shift & 7).to(torch.uint8) for shift in range(0, 24, 3)]
    else:
        each = [octets >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(each, dim=-1).flatten(1)


def _scales(scheme: Scheme, tensor: torch.Tensor, rows: range) -> torch.Tensor:
    """Return fp32 ``[rows, groups]``."""
    if tensor.numel() == 1:
        return tensor.float().reshape(1, 1).expand(len(rows), 1)
    if tensor.dim() == 1:
        tensor = tensor[:, None]
    if scheme.scale_transposed:
        tensor = tensor.t()
    step = scheme.row_group
    if step == 1:
        return tensor[rows.start : rows.stop].float()
    blocks = tensor[rows.start // step : -(-rows.stop // step)].float()
    return blocks.repeat_interleave(step, dim=0)[: len(rows)]
