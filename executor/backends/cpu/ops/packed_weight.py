"""A weight packed for the host kernels: owns its memory, checks shapes, multiplies.

The reference is `quintet.executor.backends.cpu.ops.linear.linear`. The layout is csrc/cpu/linear.hpp's and known
nowhere else; packed bytes may be written to a file and mapped again by the same version, on any processor.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES, FLOAT_DTYPES
from quintet.executor.backends.cpu.ops.host_linear import CodesProblem, Inputs, LinearLibrary, WeightFormat
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.ops.linear import GatedActivation

ALIGNMENT = 64
LEAVES = (1, 2, 4, 8)
"""Into how many a depth may be divided."""


class PackedWeightError(ValueError):
    """A tensor or a format that a packed weight cannot take; the message says which is expected."""


class PackedWeight:
    """A weight ``[columns, depth]`` (columns are outputs) in a format of the host kernels.

    ``paired``: columns ``[0, n / 2)`` are gates and the others the ups that belong to them, for a `GatedActivation`. ``group``:
    how many k share a scale (16, 32, 64 or 128; 0: one scale per column, int8 only, or what GGUF's formats have). ``memory``:
    bytes packed before, which may be read-only; otherwise zeros, to be filled. ``leaves``: 2, 4 or 8 pieces of k alike, that are
    packed and rounded each for itself, and whose sums are added as a tree: what is not paired, and not filled with codes or
    blocks. ``cut_columns``: for how many outputs k is cut into slices, which decide on bits: those of other processes and of all
    leaves among them; None: this weight's. ``outliers``: for how many there is room, of `WeightFormat.TABLES` alone
    (`quintet.executor.backends.cpu.ops.packed_tables`).
    """

    __slots__ = (
        "_handle",
        "columns",
        "depth",
        "format",
        "group",
        "leaves",
        "library",
        "memory",
        "outliers",
        "paired",
    )

    def __init__(
        self,
        library: LinearLibrary,
        weight_format: WeightFormat,
        columns: int,
        depth: int,
        *,
        group: int = 0,
        paired: bool = False,
        memory: torch.Tensor | None = None,
        leaves: int = 1,
        cut_columns: int | None = None,
        outliers: int = 0,
    ) -> None:
        self._handle: int | None = None
        if depth % leaves or leaves not in LEAVES or (leaves > 1 and (paired or weight_format.has_tables)):
            raise PackedWeightError(
                f"no packed weight [{columns}, {depth}] in {leaves} leaves, paired {paired}: there are 1, 2, 4 or 8, which"
                " divide the depth; 1 of paired columns, and of tables"
            )
        leaf_depth = depth // leaves
        size_bytes = (
            library.weight_bytes(int(weight_format), columns, leaf_depth, group, int(paired)) * leaves
        )
        if size_bytes == 0:
            raise PackedWeightError(
                f"no packed weight [{columns}, {depth}] in {weight_format.name} with group {group}, paired {paired}: sizes are "
                "at least 1, paired columns even, the group 0 for floating-point formats, 0, 16, 32, 64 or 128 for int8, "
                "16, 32, 64 or 128 for int4, with zero points and of coded floats; 0 for GGUF's formats and fp4, and their "
                "depth whole blocks"
            )
        if outliers and not weight_format.has_tables:
            raise PackedWeightError(f"outliers of a {weight_format.name} weight, which has no tables")
        tiles_bytes = size_bytes
        outlier_bytes = library.weight_outlier_bytes(columns, depth, int(paired), outliers)
        if outliers and not outlier_bytes:
            raise PackedWeightError(f"{outliers} outliers are more than a packed weight has room for")
        size_bytes += outlier_bytes
        if memory is None:
            memory = HugePages(size_bytes).memory
        elif memory.dtype is not torch.uint8 or memory.shape != (size_bytes,) or not memory.is_contiguous():
            raise PackedWeightError(
                f"packed bytes are {memory.dtype}{list(memory.shape)}; expected uint8[{size_bytes}], contiguous"
            )
        elif memory.data_ptr() % ALIGNMENT:
            raise PackedWeightError(
                f"packed bytes lie at {memory.data_ptr():#x}; expected a multiple of {ALIGNMENT}"
            )
        self.library = library
        self.format, self.columns, self.depth = weight_format, columns, depth
        self.group, self.paired, self.memory, self.leaves = group, paired, memory, leaves
        self.outliers = outliers
        self._handle = library.weight_new(
            *(int(weight_format), columns, leaf_depth, group, int(paired), leaves),
            *(columns if cut_columns is None else cut_columns, memory.data_ptr()),
        )
        if outliers:
            library.weight_set_outliers(self._handle, memory.data_ptr() + tiles_bytes, outliers)

    def __del__(self) -> None:
        if self._handle is not None:
            self.library.weight_delete(self._handle)

    @property
    def handle(self) -> int:
        """What programs take as their weight; valid while this object lives."""
        assert self._handle is not None
        return self._handle

    @property
    def output_columns(self) -> int:
        """The width of what `linear` returns."""
        return self.columns // 2 if self.paired else self.columns

    def fill(self, source: torch.Tensor, first_column: int = 0) -> None:
        """Pack ``source [count, depth]`` into the columns from ``first_column`` on, quantizing it for integer formats.

        Any floating-point dtype; rows may lie apart.
        """
        if source.dim() != 2 or source.shape[1] != self.depth or source.dtype not in FLOAT_CODES:
            raise PackedWeightError(
                f"source is {source.dtype}{list(source.shape)}; expected bfloat16, float16 or float32[count, {self.depth}]"
            )
        self.check_columns(first_column, source.shape[0])
        if self.format.has_own_group or self.format.is_coded_float or self.format.has_singles:
            raise PackedWeightError(
                f"nothing is rounded into {self.format.name}: it takes a checkpoint's numbers"
            )
        if source.stride(1) != 1:
            source = source.contiguous()
        self.library.weight_fill(
            self.handle,
            source.data_ptr(),
            FLOAT_CODES[source.dtype],
            source.stride(0),
            first_column,
            source.shape[0],
        )

    def fill_codes(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        first_column: int = 0,
        group: int = 0,
    ) -> None:
        """Pack ``codes [count, depth]`` times their scales into the columns from ``first_column`` on; nothing is rounded.

        `read` gives ``(code - zero) * scale`` afterwards. codes: int8, whose zero is 0, or uint8, whose zero is 8 (4 bits) or
        128; with ``zeros``, which formats with zero points take, uint8 of any zero. scales: bfloat16, float16 or
        float32 ``[count, ceil(depth / group)]``; zeros: uint8, or float32 of the formats ``…_SINGLE_ZEROS``, likewise. ``group``:
        how many k share a scale, a multiple of this weight's group; 0: the weight's, or all of k where there is one scale for
        each column.

        Of `WeightFormat.FP8`, `NF4` and `FP4` codes are uint8 without ``zeros``, `read` gives ``number * scale`` rounded to fp32,
        and scales are held in fp32.

        Of the formats ``…_SINGLE`` scales are held in fp32, too. Scales of groups of others are held as fp16 times a power of
        two of the column: all of fp16, and bf16 down to 2^-25 of the column's largest. Raises `PackedWeightError` for others, and
        for codes of more than 4 bits where the format has 4.
        """
        count, group = codes.shape[0], group or self.group
        if scales.dim() == 2 and scales.shape[1] == 1:
            group = self.depth
        self._check_codes(codes, scales, zeros, group)
        self._check_is_whole()
        self.check_columns(first_column, count)
        codes, scales = _with_rows(codes), _with_rows(scales)
        zeros = None if zeros is None else _with_rows(zeros)
        problems = self.library.weight_fill_codes(
            *(self.handle, codes.data_ptr(), int(codes.dtype is torch.int8), codes.stride(0)),
            *(scales.data_ptr(), FLOAT_CODES[scales.dtype], scales.stride(0), group, None),
            *((None, 0) if zeros is None else (zeros.data_ptr(), zeros.stride(0))),
            *(first_column, count),
        )
        if problems & CodesProblem.CODE:
            raise PackedWeightError(
                "codes of a 4-bit weight are 0 to 15, or as int8 -8 to 7, and no fp8 is NaN; there are others"
            )
        if problems & CodesProblem.SCALE and self.format.has_singles:
            raise PackedWeightError("some scales or zero points are not finite")
        if problems & CodesProblem.SCALE:
            raise PackedWeightError(
                f"scales are {scales.dtype}, and some are not finite, or not an fp16 number times a power of two of their "
                "column: round them to float16 first"
            )

    def fill_fp4(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factors: torch.Tensor | None = None,
        first_column: int = 0,
    ) -> None:
        """Pack ``codes [count, depth]`` of fp4 numbers, a byte each, into the columns from ``first_column`` on, unrounded.

        scales: the bytes ``uint8[count, groups]`` of exponents in groups of 32 (`WeightFormat.MXFP4`) or of fp8 numbers, e4m3, in
        groups of 16 (`WeightFormat.NVFP4`). factors: what each column is multiplied with besides, ``float32[count]``. Raises
        `PackedWeightError` for codes above 15 and scales that are not a number.
        """
        self._check_is_whole()
        group, count = self.format.bytes_group, codes.shape[0]
        if group == 0:
            raise PackedWeightError(f"fp4 numbers for a {self.format.name} weight")
        for name, tensor, shape in (
            ("codes", codes, (count, self.depth)),
            ("scales", scales, (count, self.depth // group)),
        ):
            if tensor.shape != shape or tensor.dtype is not torch.uint8:
                raise PackedWeightError(
                    f"{name} are {tensor.dtype}{list(tensor.shape)}; expected uint8{list(shape)}"
                )
        if factors is not None and (factors.shape != (count,) or factors.dtype is not torch.float32):
            raise PackedWeightError(
                f"factors are {factors.dtype}{list(factors.shape)}; expected float32[{count}]"
            )
        self.check_columns(first_column, count)
        codes, scales = _with_rows(codes), _with_rows(scales)
        factors = None if factors is None else factors.contiguous()
        problems = self.library.weight_fill_codes(
            *(self.handle, codes.data_ptr(), 0, codes.stride(0)),
            *(scales.data_ptr(), int(WeightFormat.INT8), scales.stride(0), group),
            *(None if factors is None else factors.data_ptr(), None, 0, first_column, count),
        )
        if problems & CodesProblem.CODE:
            raise PackedWeightError("codes of fp4 numbers are 0 to 15; there are others")
        if problems & CodesProblem.SCALE:
            raise PackedWeightError("a scale or a factor of fp4 numbers is not a number")

    def fill_blocks(self, blocks: torch.Tensor, first_column: int = 0) -> None:
        """Pack rows of a GGUF file, ``uint8[count, row bytes]``, into the columns from ``first_column`` on; nothing is rounded.

        Their type is this weight's format: Q8_0 is `WeightFormat.INT8` and Q4_0 `WeightFormat.INT4`, both in groups of 32. What
        `read` gives afterwards is what the file's format defines. Rows may lie apart.
        """
        self._check_is_whole()
        block = self.format.block(self.group)
        if block is None:
            raise PackedWeightError(
                f"no block of a GGUF file is {self.format.name} in groups of {self.group}"
            )
        if self.depth % block[0]:
            raise PackedWeightError(f"a depth of {self.depth} is not whole blocks of {block[0]}")
        row_bytes = self.depth // block[0] * block[1]
        if blocks.dim() != 2 or blocks.shape[1] != row_bytes or blocks.dtype is not torch.uint8:
            raise PackedWeightError(
                f"blocks are {blocks.dtype}{list(blocks.shape)}; expected uint8[count, {row_bytes}]"
            )
        self.check_columns(first_column, blocks.shape[0])
        blocks = _with_rows(blocks)
        self.library.weight_fill_blocks(
            self.handle, blocks.data_ptr(), blocks.stride(0), first_column, blocks.shape[0]
        )

    def read(self, first_column: int = 0, num_columns: int | None = None) -> torch.Tensor:
        """Return columns as ``float32[num_columns, depth]``: exactly the numbers that are multiplied."""
        count = self.columns - first_column if num_columns is None else num_columns
        self.check_columns(first_column, count)
        out = torch.empty((count, self.depth), dtype=torch.float32)
        self.library.weight_read(self.handle, first_column, count, out.data_ptr())
        return out

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        activation: GatedActivation = GatedActivation.NONE,
        inputs: Inputs = Inputs.SIXTEEN_BITS,
        result_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return ``out [rows, output_columns]``: `quintet.executor.backends.cpu.ops.linear.linear`, added to ``residual``.

        x: ``[rows, depth]``. ``out`` may be ``residual``. Rows of x and of out may lie apart. result_dtype: of out: x's, or
        float32 without residual and activation; None: x's.
        """
        self.check(x, bias, activation, inputs)
        rows, width, dtype = x.shape[0], self.output_columns, result_dtype or x.dtype
        if out is None:
            out = torch.empty((rows, width), dtype=dtype)
        for name, tensor in (("out", out), ("residual", residual)):
            if tensor is not None and (tensor.dtype, tensor.shape) != (dtype, (rows, width)):
                raise PackedWeightError(
                    f"{name} is {tensor.dtype}{list(tensor.shape)}; expected {dtype}[{rows}, {width}]"
                )
        if dtype != x.dtype and (dtype != torch.float32 or residual is not None or activation):
            raise PackedWeightError(
                f"a result in {dtype} of x in {x.dtype}: expected {x.dtype}, or torch.float32 without residual and activation"
            )
        if out.stride(1) != 1 or (residual is not None and residual.stride() != out.stride()):
            raise PackedWeightError(
                "out and residual: rows must be contiguous and lie equally far apart in both"
            )
        if residual is not None and self.paired:
            raise PackedWeightError("a paired weight takes no residual: its output is not added to anything")
        self.library.linear(
            self.handle,
            x.data_ptr(),
            x.stride(0),
            rows,
            FLOAT_CODES[x.dtype],
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            int(activation),
            int(inputs),
            FLOAT_CODES[dtype],
        )
        return out

    def check(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation, inputs: Inputs
    ) -> None:
        """Raise `PackedWeightError` unless this weight can be multiplied so."""
        own = FLOAT_DTYPES.get(int(self.format))
        if x.dim() != 2 or x.shape[1] != self.depth or x.dtype not in ([own] if own else FLOAT_CODES):
            expected = own or "bfloat16, float16 or float32"
            raise PackedWeightError(f"x is {x.dtype}{list(x.shape)}; expected {expected}[rows, {self.depth}]")
        if x.stride(1) != 1:
            raise PackedWeightError(f"rows of x have stride {x.stride(1)}; expected contiguous rows")
        if bias is not None and (bias.dtype, bias.shape) != (x.dtype, (self.columns,)):
            raise PackedWeightError(
                f"bias is {bias.dtype}{list(bias.shape)}; expected {x.dtype}[{self.columns}]"
            )
        if self.paired is (activation is GatedActivation.NONE):
            raise PackedWeightError(
                f"{activation.name} on a weight that is {'' if self.paired else 'not '}paired: paired weights need an "
                "activation, others take none"
            )
        if inputs != Inputs.SIXTEEN_BITS and not self.format.is_integer:
            raise PackedWeightError(
                f"8-bit activations on a {self.format.name} weight: it takes its own format"
            )

    def _check_codes(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
    ) -> None:
        if self.format.code_levels == 0 or self.format.bytes_group != 0:
            raise PackedWeightError(f"codes for a {self.format.name} weight: it takes none")
        if self.format.is_coded_float and codes.dtype is torch.int8:
            raise PackedWeightError(f"codes are int8; {self.format.name} takes uint8")
        if codes.shape[1:] != (self.depth,) or codes.dtype not in (torch.int8, torch.uint8):
            raise PackedWeightError(
                f"codes are {codes.dtype}{list(codes.shape)}; expected int8 or uint8[count, {self.depth}]"
            )
        if group != self.depth and (group <= 0 or self.group == 0 or group % self.group):
            raise PackedWeightError(f"scales of {group} k each, of a weight with groups of {self.group}")
        shape = (codes.shape[0], -(-self.depth // group))
        if scales.shape != shape or scales.dtype not in FLOAT_CODES:
            raise PackedWeightError(
                f"scales are {scales.dtype}{list(scales.shape)}; expected bfloat16, float16 or float32{list(shape)}"
            )
        if zeros is None:
            return
        if not self.format.has_zeros or codes.dtype is torch.int8:
            raise PackedWeightError(
                f"zero points of {codes.dtype} in {self.format.name}: expected uint8 codes and a ..._ZEROS"
            )
        dtype = torch.float32 if self.format.has_real_zeros else torch.uint8
        if zeros.shape != shape or zeros.dtype is not dtype:
            raise PackedWeightError(
                f"zeros are {zeros.dtype}{list(zeros.shape)}; expected {dtype}{list(shape)}"
            )

    def _check_is_whole(self) -> None:
        if self.leaves > 1:
            raise PackedWeightError(
                f"a weight in {self.leaves} leaves takes numbers that are rounded by leaf, not a checkpoint's codes and blocks"
            )

    def check_columns(self, first: int, count: int) -> None:
        """Raise `PackedWeightError` unless there are such columns."""
        if first < 0 or count < 0 or first + count > self.columns:
            raise PackedWeightError(f"columns {first} to {first + count} of a weight that has {self.columns}")


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return it with the elements of a row beside one another."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
