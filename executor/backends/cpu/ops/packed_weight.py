"""A weight packed for the host kernels: owns its memory, checks shapes, multiplies.

The reference is `quintet.executor.backends.cpu.ops.linear.linear`. Only csrc/cpu/linear/linear.hpp knows the
layout. Packed bytes may be written to a file and mapped by the same version, on any processor.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES, FLOAT_DTYPES
from quintet.executor.backends.cpu.ops.host_linear import CodesProblem, Inputs, LinearLibrary, WeightFormat
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.ops.linear import GatedActivation

ALIGNMENT = 64
LEAVES = (1, 2, 4, 8)
"""Allowed numbers of leaves of a depth."""


class PackedWeightError(ValueError):
    """Unsupported tensor or format; the message names the expected one."""


class PackedWeight:
    """A weight ``[columns, depth]`` (columns are outputs) in a format of the host kernels.

    - paired: columns ``[0, n / 2)`` are gates and the others the matching ups, for a `GatedActivation`.
    - group: number of inputs per scale, 16, 32, 64 or 128; 0: one scale per column (int8 only), or a format with its own group.
    - memory: previously packed bytes, possibly read-only; None: zeros, to be filled.
    - leaves: 2, 4 or 8 equal parts of the depth that are packed and rounded separately; their sums are added as a tree. Not for
      paired weights, nor for weights filled with codes or blocks.
    - cut_columns: number of outputs that determines the slices of the depth, and so the bits. Includes the outputs of other
      processes and of all leaves. None: this weight's.
    - outliers: capacity for outliers, only for `WeightFormat.TABLES` (`quintet.executor.backends.cpu.ops.packed_tables`).
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
                f"unsupported packed weight [{columns}, {depth}] in {leaves} leaves, paired {paired}: the leaves must be 1, 2, 4"
                " or 8 and divide the depth; paired columns and tables need 1"
            )
        leaf_depth = depth // leaves
        size_bytes = (
            library.weight_bytes(int(weight_format), columns, leaf_depth, group, int(paired)) * leaves
        )
        if size_bytes == 0:
            raise PackedWeightError(
                f"unsupported packed weight [{columns}, {depth}] in {weight_format.name} with group {group}, paired {paired}: "
                "sizes must be at least 1, and paired columns even; the group must be 0 for floating-point formats, 0, 16, 32, "
                "64 or 128 for int8, and 16, 32, 64 or 128 for int4, zero points and coded floats; GGUF formats and fp4 need "
                "group 0 and a depth of whole blocks"
            )
        if outliers and not weight_format.has_tables:
            raise PackedWeightError(
                f"the weight is {weight_format.name}; outliers need a weight of format TABLES"
            )
        tiles_bytes = size_bytes
        outlier_bytes = library.weight_outlier_bytes(columns, depth, int(paired), outliers)
        if outliers and not outlier_bytes:
            raise PackedWeightError(f"{outliers} outliers exceed the capacity of a packed weight")
        size_bytes += outlier_bytes
        if memory is None:
            memory = HugePages(size_bytes).memory
        elif memory.dtype is not torch.uint8 or memory.shape != (size_bytes,) or not memory.is_contiguous():
            raise PackedWeightError(
                f"packed bytes are {memory.dtype}{list(memory.shape)}; expected uint8[{size_bytes}], contiguous"
            )
        elif memory.data_ptr() % ALIGNMENT:
            raise PackedWeightError(
                f"the address of the packed bytes is {memory.data_ptr():#x}; expected a multiple of {ALIGNMENT}"
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
        """C handle of the weight; valid while this object lives."""
        assert self._handle is not None
        return self._handle

    @property
    def output_columns(self) -> int:
        """Width of the result of `linear`."""
        return self.columns // 2 if self.paired else self.columns

    def fill(self, source: torch.Tensor, first_column: int = 0) -> None:
        """Pack ``source [count, depth]`` into the columns from ``first_column``; integer formats quantize it.

        source: any floating-point dtype; rows may be strided.
        """
        if source.dim() != 2 or source.shape[1] != self.depth or source.dtype not in FLOAT_CODES:
            raise PackedWeightError(
                f"source is {source.dtype}{list(source.shape)}; expected bfloat16, float16 or float32[count, {self.depth}]"
            )
        self.check_columns(first_column, source.shape[0])
        if self.format.has_own_group or self.format.is_coded_float or self.format.has_singles:
            raise PackedWeightError(
                f"cannot quantize into {self.format.name}: it is only filled from a checkpoint's codes"
            )
        source = _with_rows(source)
        self.library.weight_fill(
            *(self.handle, source.data_ptr(), FLOAT_CODES[source.dtype], source.stride(0)),
            *(first_column, source.shape[0]),
        )

    def fill_codes(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        first_column: int = 0,
        group: int = 0,
    ) -> None:
        """Pack quantized ``codes [count, depth]`` into the columns from ``first_column`` without rounding.

        `read` then returns ``(code - zero) * scale``.

        - codes: int8 with zero point 0, or uint8 with zero point 8 (4 bits) or 128. With ``zeros``: uint8.
        - scales: bfloat16, float16 or float32 ``[count, ceil(depth / group)]``.
        - zeros: uint8, or float32 for the formats ``…_SINGLE_ZEROS``; shaped like scales. Only for formats with zero points.
        - group: inputs per scale, a multiple of this weight's group; 0: the weight's, or the depth with one scale per column.

        For `WeightFormat.FP8`, `NF4` and `FP4`, codes are uint8 without ``zeros``, and `read` returns ``value * scale`` rounded
        to fp32. These and the formats ``…_SINGLE`` hold scales in fp32. Other formats with groups hold them as fp16 times a
        power of two of the column: all of fp16, and bf16 down to 2^-25 of the column's largest. Raises `PackedWeightError` for
        other scales, and for codes out of range.
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
                "some codes are out of range: a 4-bit weight allows 0 to 15, or -8 to 7 in int8, and fp8 must not be NaN"
            )
        if problems & CodesProblem.SCALE and self.format.has_singles:
            raise PackedWeightError("some scales or zero points are not finite")
        if problems & CodesProblem.SCALE:
            raise PackedWeightError(
                f"scales are {scales.dtype}, and some are not finite or not an fp16 number times a power of two of their "
                "column: round them to float16 first"
            )

    def fill_fp4(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factors: torch.Tensor | None = None,
        first_column: int = 0,
    ) -> None:
        """Pack fp4 ``codes [count, depth]``, one per byte, into the columns from ``first_column`` without rounding.

        scales: ``uint8[count, groups]``, exponents in groups of 32 (`WeightFormat.MXFP4`) or fp8 e4m3 in groups of 16
        (`WeightFormat.NVFP4`). factors: one more scale per column, ``float32[count]``. Raises `PackedWeightError` for codes
        above 15 and for NaN scales.
        """
        self._check_is_whole()
        group, count = self.format.bytes_group, codes.shape[0]
        if group == 0:
            raise PackedWeightError(f"the weight is {self.format.name}; fp4 codes need MXFP4 or NVFP4")
        check_tensor("codes are", codes, torch.uint8, (count, self.depth))
        check_tensor("scales are", scales, torch.uint8, (count, self.depth // group))
        if factors is not None:
            check_tensor("factors are", factors, torch.float32, (count,))
        self.check_columns(first_column, count)
        codes, scales = _with_rows(codes), _with_rows(scales)
        factors = None if factors is None else factors.contiguous()
        problems = self.library.weight_fill_codes(
            *(self.handle, codes.data_ptr(), 0, codes.stride(0)),
            *(scales.data_ptr(), int(WeightFormat.INT8), scales.stride(0), group),
            *(None if factors is None else factors.data_ptr(), None, 0, first_column, count),
        )
        if problems & CodesProblem.CODE:
            raise PackedWeightError("some codes are above 15; fp4 codes are 0 to 15")
        if problems & CodesProblem.SCALE:
            raise PackedWeightError("some fp4 scales or factors are NaN")

    def fill_blocks(self, blocks: torch.Tensor, first_column: int = 0) -> None:
        """Pack rows of a GGUF file, ``uint8[count, row bytes]``, into the columns from ``first_column`` without rounding.

        Their GGUF type must match this weight's format: Q8_0 is `WeightFormat.INT8` and Q4_0 `WeightFormat.INT4`, both in
        groups of 32. `read` then returns the values that GGUF defines. Rows may be strided.
        """
        self._check_is_whole()
        block = self.format.block(self.group)
        if block is None:
            raise PackedWeightError(
                f"GGUF has no block format for {self.format.name} in groups of {self.group}"
            )
        if self.depth % block[0]:
            raise PackedWeightError(
                f"the depth is {self.depth}; expected a multiple of the block size {block[0]}"
            )
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
        """Return columns as ``float32[num_columns, depth]``: exactly the values that the kernels multiply."""
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
        """Compute `quintet.executor.backends.cpu.ops.linear.linear` plus ``residual`` into ``out [rows, output_columns]``.

        x: ``[rows, depth]``. ``out`` may be ``residual``. Rows of x and out may be strided. result_dtype: dtype of out, that of
        x or float32; float32 excludes residual and activation; None: that of x.
        """
        self.check(x, bias, activation, inputs)
        rows, width, dtype = x.shape[0], self.output_columns, result_dtype or x.dtype
        if out is None:
            out = torch.empty((rows, width), dtype=dtype)
        check_tensor("out is", out, dtype, (rows, width))
        if residual is not None:
            check_tensor("residual is", residual, dtype, (rows, width))
        if dtype != x.dtype and (dtype != torch.float32 or residual is not None or activation):
            raise PackedWeightError(
                f"the result dtype is {dtype}; expected {x.dtype}, or torch.float32 without residual and activation"
            )
        if out.stride(1) != 1 or (residual is not None and residual.stride() != out.stride()):
            raise PackedWeightError("out and residual must have contiguous rows and equal strides")
        if residual is not None and self.paired:
            raise PackedWeightError("a residual was given, but a paired weight does not support one")
        self.library.linear(
            *(self.handle, x.data_ptr(), x.stride(0), rows, FLOAT_CODES[x.dtype]),
            *(None if each is None else each.data_ptr() for each in (bias, residual)),
            *(out.data_ptr(), out.stride(0), int(activation), int(inputs), FLOAT_CODES[dtype]),
        )
        return out

    def check(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation, inputs: Inputs
    ) -> None:
        """Raise `PackedWeightError` unless this weight supports the arguments of `linear`."""
        own = FLOAT_DTYPES.get(int(self.format))
        if x.dim() != 2 or x.shape[1] != self.depth or x.dtype not in ([own] if own else FLOAT_CODES):
            expected = own or "bfloat16, float16 or float32"
            raise PackedWeightError(f"x is {x.dtype}{list(x.shape)}; expected {expected}[rows, {self.depth}]")
        if x.stride(1) != 1:
            raise PackedWeightError(f"rows of x have stride {x.stride(1)}; expected contiguous rows")
        if bias is not None:
            check_tensor("bias is", bias, x.dtype, (self.columns,))
        if self.paired is (activation is GatedActivation.NONE):
            raise PackedWeightError(
                f"the activation is {activation.name} and the weight is {'' if self.paired else 'not '}paired: paired weights "
                "need an activation, others must have none"
            )
        if inputs != Inputs.SIXTEEN_BITS and not self.format.is_integer:
            raise PackedWeightError(
                f"8-bit activations need an integer weight; this weight is {self.format.name}"
            )

    def _check_codes(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
    ) -> None:
        if self.format.code_levels == 0 or self.format.bytes_group != 0:
            raise PackedWeightError(f"the weight is {self.format.name}, which cannot be filled from codes")
        if self.format.is_coded_float and codes.dtype is torch.int8:
            raise PackedWeightError(f"codes are int8; {self.format.name} needs uint8")
        if codes.shape[1:] != (self.depth,) or codes.dtype not in (torch.int8, torch.uint8):
            raise PackedWeightError(
                f"codes are {codes.dtype}{list(codes.shape)}; expected int8 or uint8[count, {self.depth}]"
            )
        if group != self.depth and (group <= 0 or self.group == 0 or group % self.group):
            raise PackedWeightError(
                f"scales have a group of {group}; expected a multiple of the weight's group {self.group}"
            )
        shape = (codes.shape[0], -(-self.depth // group))
        if scales.shape != shape or scales.dtype not in FLOAT_CODES:
            raise PackedWeightError(
                f"scales are {scales.dtype}{list(scales.shape)}; expected bfloat16, float16 or float32{list(shape)}"
            )
        if zeros is None:
            return
        if not self.format.has_zeros or codes.dtype is torch.int8:
            raise PackedWeightError(
                f"zero points with {codes.dtype} codes in {self.format.name}: expected uint8 codes and a format ..._ZEROS"
            )
        dtype = torch.float32 if self.format.has_real_zeros else torch.uint8
        check_tensor("zeros are", zeros, dtype, shape)

    def _check_is_whole(self) -> None:
        if self.leaves > 1:
            raise PackedWeightError(
                f"the weight has {self.leaves} leaves, which are quantized separately; codes and blocks need 1 leaf"
            )

    def check_columns(self, first: int, count: int) -> None:
        """Raise `PackedWeightError` unless the columns exist."""
        if first < 0 or count < 0 or first + count > self.columns:
            raise PackedWeightError(
                f"columns {first} to {first + count} are out of range; the weight has {self.columns}"
            )


def check_tensor(words: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise `PackedWeightError`, which begins with ``words``, for another dtype or shape."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise PackedWeightError(f"{words} {tensor.dtype}{list(tensor.shape)}; expected {dtype}{list(shape)}")


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with contiguous rows."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
