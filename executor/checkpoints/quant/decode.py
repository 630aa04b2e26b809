"""Decode checkpoint tensors of a quantized layer to codes, scales and zero points, with torch.

`quintet.executor.checkpoints.quant.formats` describes the tensors. Rows are decoded in chunks, which bounds the
memory for unpacked codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from quintet.executor.backends.cpu.ops.packed_tables import Outliers
from quintet.executor.checkpoints.quant.formats.scheme import E2M1, Packing, Scheme
from quintet.wire.errors import ConfigError

ROWS_STEP = 128
"""Row ranges begin and end on multiples of this, except at the last row: blocks of scales and words of codes stay whole."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows of a weight before packing."""

    codes: torch.Tensor
    """``[rows, depth]``: uint8, or floating-point values."""
    scales: torch.Tensor
    """fp32 ``[rows, groups]``."""
    zeros: torch.Tensor | None
    """uint8 ``[rows, groups]``, or fp32 if fractional; None: every zero point is `zero`."""
    zero: int
    group: int
    """Group size: adjacent inputs that share a scale; 0: all inputs."""
    order: torch.Tensor | None = None
    """int64 ``[depth]``: group of each input, if groups are not contiguous."""
    table: torch.Tensor | None = None
    """fp32: value of each code."""
    scale_bytes: torch.Tensor | None = None
    """uint8 ``[rows, groups]``: fp4 scales as stored, before `factor`."""
    factor: torch.Tensor | None = None
    """fp32 ``[1]``: global factor of all scales."""
    row_tables: torch.Tensor | None = None
    """fp32 ``[rows, 16]``: value of each code in a row. Scales are 1."""
    outliers: Outliers | None = None
    """Values that are added to some weights."""

    def rows(self, some: range) -> Coded:
        """Return a range of the rows."""
        if len(some) == len(self.codes):
            return self
        cut = slice(some.start, some.stop)
        zeros = None if self.zeros is None else self.zeros[cut]
        scale_bytes = None if self.scale_bytes is None else self.scale_bytes[cut]
        return replace(
            self,
            codes=self.codes[cut],
            scales=self.scales[cut],
            zeros=zeros,
            scale_bytes=scale_bytes,
            row_tables=None if self.row_tables is None else self.row_tables[cut],
            outliers=None if self.outliers is None else self.outliers.rows(some),
        )

    def floats(self) -> torch.Tensor:
        """Return the dequantized values, fp32 ``[rows, depth]``."""
        depth = self.codes.shape[1]
        if self.row_tables is not None:
            numbers = self.row_tables.gather(1, self.codes.long())
            if self.outliers is not None:
                self.outliers.add_to(numbers)
            return numbers
        if self.table is not None:
            values = self.table.to(self.codes.device)[self.codes.int()]
        else:
            values = self.codes.float()
            values -= self.zero if self.zeros is None else self._spread(self.zeros.float(), depth)
        return values.mul_(self._spread(self.scales, depth))

    def with_inputs_multiplied(self, factors: torch.Tensor) -> Coded:
        """Return dequantized rows multiplied by ``factors [depth]``, which replace the scaling of the inputs."""
        return Coded(self.floats() * factors.float(), torch.ones(len(self.codes), 1), None, 0, 0)

    def _spread(self, by_group: torch.Tensor, depth: int) -> torch.Tensor:
        """Expand ``[rows, groups]`` to ``[rows, depth]``; ``[rows, 1]`` for a single group."""
        if self.order is not None:
            return by_group[:, self.order]
        if by_group.shape[1] == 1:
            return by_group
        return by_group.repeat_interleave(self.group, dim=1)[:, :depth]


Decoder = Callable[[Scheme, Mapping[str, torch.Tensor], int, int, int], Coded]
"""Arguments: scheme, tensors by suffix, depth, begin and end of a row range. The range begins on a multiple of
`ROWS_STEP` and ends on one or at the last row. Raises `ConfigError` for invalid values."""


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `Decoder`."""
    first, second = (tensors[each.ending] for each in scheme.stored[:2])
    rows = range(begin, end)
    codes, zero = first[begin:end], 0
    if scheme.codes is not None:
        codes, zero = unpacked(scheme.codes, first, rows, depth), 1 << (scheme.codes.bits - 1)
        codes = codes ^ zero if scheme.codes.is_signed else codes
    groups = -(-depth // (scheme.group or depth))
    scales = _scales(scheme, second, rows)[:, :groups] * scheme.scale_factor
    factor = None
    if scheme.global_scale is not None:
        factor = tensors[scheme.global_scale].float().reshape(1)
        factor = 1 / factor if scheme.divides else factor
        scales = scales * factor
    zeros = None
    if codes.dtype is torch.int8 and scheme.has_int8_zeros and scheme.all_zeros is not None:
        _check_zeros(scheme, tensors[scheme.stored[2].ending])
    elif codes.dtype is torch.int8 and scheme.has_int8_zeros:
        codes = codes.view(torch.uint8) ^ 128
        zeros = tensors[scheme.stored[2].ending][begin:end].to(torch.int8).reshape(len(rows), groups)
        zeros = zeros.view(torch.uint8) ^ 128
    elif scheme.zeros is not None:
        zeros = unpacked(scheme.zeros, tensors[scheme.stored[2].ending], rows, groups)
        zeros = zeros ^ (1 << scheme.zeros.bits - 1) if scheme.zeros.is_signed else zeros
        zeros = (zeros + scheme.zero_offset) & ((1 << scheme.zeros.bits) - 1)
        if scheme.all_zeros is not None:
            _check_zeros(scheme, zeros)
            zeros = None
    order = None
    if scheme.order is not None:
        order = tensors[scheme.order].long()
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise ConfigError(
                f"{scheme.order} has groups {int(order.min())} to {int(order.max())}; the layer has {groups} groups"
            )
    if scheme.is_fp4:
        its = second[begin:end].view(torch.uint8)
        return Coded(
            codes, scales, None, 0, scheme.group, table=torch.tensor(E2M1), scale_bytes=its, factor=factor
        )
    return Coded(codes, scales, zeros, zero, scheme.group, order)


def _check_zeros(scheme: Scheme, zeros: torch.Tensor) -> None:
    """Refuse zero points other than those of a symmetric format."""
    wanted = scheme.all_zeros
    if wanted is not None and bool((zeros != wanted).any()):
        raise ConfigError(
            f"{scheme.stored[2].ending} has zero points other than {wanted}, but by quantization_config the"
            " weights are symmetric: download config.json again"
        )


def mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> Coded:
    """Return rows of MXFP4 codes.

    blocks: uint8 ``[rows, depth / 32, 16]``, first code in the low bits; exponents: uint8 ``[rows, depth / 32]``,
    biased by 127.
    """
    codes = stream(blocks.flatten(1), 4)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    return Coded(codes, scales, None, 0, 32, table=torch.tensor(E2M1), scale_bytes=exponents)


def unpacked(packing: Packing, tensor: torch.Tensor, rows: range, depth: int) -> torch.Tensor:
    """Unpack codes of some rows: uint8 ``[rows, depth]``."""
    bits, begin, end = packing.bits, rows.start, rows.stop
    if packing.packed_along == "rows":
        begin, end = begin * bits // packing.word_bits, -(-end * bits // packing.word_bits)
    words = tensor[:, begin:end] if packing.transposed else tensor[begin:end]
    if packing.transposed != (packing.packed_along == "rows"):
        # Codes of a word lie along the last dimension; contiguous() first is faster.
        words = words.contiguous().t()
    codes = stream(words.contiguous().view(torch.uint8), bits)
    if packing.packed_along == "depth":
        return codes[:, :depth]
    if packing.evens_first:
        halves = codes.view(len(codes), -1, 2, 4)  # of a word: rows 0 2 4 6, rows 1 3 5 7
        return halves.permute(1, 3, 2, 0).reshape(-1, len(codes))[: len(rows), :depth]
    return codes.t()[: len(rows), :depth].contiguous()


_WIDE = {2: torch.int32, 4: torch.int16}
"""Integer dtype that the unpacked codes of one byte fill; for other bits, eight codes fill an int64."""


def stream(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes from bytes ``[rows, bytes]``, first code in the lowest bits: uint8 ``[rows, bytes * 8 / bits]``.

    Splits the codes of a word into halves, then quarters, until each code has a byte.
    """
    if bits == 8:
        return octets
    if bits in _WIDE:
        word = octets.to(_WIDE[bits])
    else:  # eight codes in ``bits`` bytes
        parts = torch.nn.functional.pad(octets, (0, -octets.shape[1] % bits)).unflatten(1, (-1, bits))
        word = parts[..., 0].long()
        for i in range(1, bits):
            word |= parts[..., i].long() << 8 * i
    count = word.dtype.itemsize
    together = count // 2
    while together:
        lump = (1 << together * bits) - 1
        firsts = sum(lump << at for at in range(0, 8 * count, 16 * together))
        word = (word & firsts) | (word & (firsts << together * bits)) << together * (8 - bits)
        together //= 2
    return word.view(torch.uint8)


def _scales(scheme: Scheme, tensor: torch.Tensor, rows: range) -> torch.Tensor:
    """Return scales, fp32 ``[rows, groups]``."""
    step = scheme.row_group or (rows.stop + 1)
    if tensor.dim() < 2:
        tensor = tensor.reshape(-1, 1)
    elif scheme.scale_transposed:
        tensor = tensor.t()
    blocks = tensor[rows.start // step : -(-rows.stop // step)]
    if blocks.dtype is torch.uint8:  # the exponent of a power of two
        blocks = torch.ldexp(torch.ones_like(blocks, dtype=torch.float32), blocks.int() - 127)
    blocks = blocks.float()
    if step == 1:
        return blocks
    return blocks.repeat_interleave(min(step, rows.stop), dim=0)[rows.start % step :][: len(rows)]
