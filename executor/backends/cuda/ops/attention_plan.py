"""Buffers and choices of attention that live as long as the model: kernels, shared memory, workspace, the step's plan.

Owns how big everything is; what is in the plan is written and read on the device only (csrc/cuda/attention_plan.cu).

Memory, with ``P`` patches of the workspace: ``P * patch * (head_dim + 2) * 4`` bytes. ``P`` is 8 per decode block and 2
per chunk block that the device runs at a time: of a head of 128 numbers on 132 multiprocessors 17 and 34 MiB. No step
needs more: a plan whose splits would not fit is not chosen, down to no splits at all. With fixed splits, chunk blocks have
18 MiB more for the totals of splits that they walk one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.rows import StepRows
from quintet.executor.models.layers.attention import AttentionWindow

TILE = 64
"""Positions that are computed together; all split sizes are multiples."""
DECODE_PATCH = 16
"""Lines, that is (new token, head) pairs of a KV head, of a block of the decode kernel: one matrix tile."""
MATRIX_DIMS = (64, 128, 256)
"""Head widths that the matrix kernels are compiled for; others are padded to the next."""
PLAIN_MAX_DIM, PLAIN_MAX_VALUE_DIM = 576, 512
MAX_POSITIONS = 1 << 22
THREADS = 128
_PLAN_THREADS = 1024
_MAX_STAGES = 8
_FIXED_SPLITS = 32
_LEAST_FIXED_SPLIT = 256
_DECODE_PATCHES_PER_BLOCK = 8
_CHUNK_PATCHES_PER_BLOCK = 2
_UNSPLIT_TILES = 1 << 30
_PLAN = Kernel("attention_plan", "attention_plan", "ppppiiiiiiiiiii")
_MATRIX_KINDS = "p" * 15 + "i" * 13 + "llfff"


@dataclass(frozen=True, slots=True)
class Fit:
    """How blocks of one kernel share a multiprocessor."""

    blocks: int
    """On a multiprocessor at a time."""
    stages: int
    """Units of the ring: 64 keys or 64 values each."""
    shared_bytes: int
    """Dynamic shared memory of a block."""

    @classmethod
    def of(cls, max_shared_bytes: int, besides_bytes: int, unit_bytes: int) -> Fit:
        """Fit two blocks with rings of four units and more, or else one.

        A kernel's static variables and what the driver keeps take a KiB of each block (CUDA C++ Programming Guide,
        "Shared Memory"); ``max_shared_bytes`` is what the largest block may have besides.
        """
        half = (max_shared_bytes + 1024) // 2 - 1024
        for blocks, available, least in ((2, half, 4), (1, max_shared_bytes, 2)):
            stages = min(_MAX_STAGES, (available - 128 - besides_bytes) // unit_bytes)
            if stages >= least:
                return cls(blocks, stages, besides_bytes + stages * unit_bytes)
        raise ValueError(
            f"attention needs {besides_bytes + 2 * unit_bytes + 128} bytes of shared memory per block, and the device has"
            f" {max_shared_bytes}"
        )


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """The kernels for one head width and number formats, and how they fit the device."""

    decode: Kernel
    chunk: Kernel
    decode_fit: Fit
    chunk_fit: Fit
    chunk_patch: int
    totals_per_block: int
    """fp32 numbers a chunk block keeps of the splits behind it."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, max_shared_bytes: int
    ) -> MatrixKernels:
        """Return the kernels that `takes_matrix_kernels` said there are."""
        dim = next(width for width in MATRIX_DIMS if width >= head_dim)
        suffix = _suffix(dtype, kv_dtype)
        row = 2 * dim + 16
        widens = kv_dtype == torch.float8_e4m3fn
        unit, wide = (TILE * dim, 2 * TILE * row) if widens else (TILE * row, 0)
        tiles_per_warp = 1 if dim > 128 else 2
        patch = 64 * tiles_per_warp
        weights, largest = DECODE_PATCH * (2 * TILE + 16), 4 * DECODE_PATCH * 4
        return cls(
            Kernel("attention_decode", f"attention_decode_{dim}_{suffix}", _MATRIX_KINDS),
            Kernel("attention_chunk", f"attention_chunk_{dim}_{suffix}", _MATRIX_KINDS),
            Fit.of(max_shared_bytes, DECODE_PATCH * row + weights + largest + wide, unit),
            Fit.of(max_shared_bytes, patch * row + wide, unit),
            patch,
            tiles_per_warp * 2 * (dim // 4 + 2) * THREADS,
        )


def takes_matrix_kernels(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether matrix instructions compute it: 16-bit formats, and rows of the cache in whole copies of 16 bytes."""
    numbers_per_copy = 16 // kv_dtype.itemsize
    return dtype.itemsize == 2 and head_dim <= MATRIX_DIMS[-1] and head_dim % numbers_per_copy == 0


def fixed_split_size(max_model_len: int) -> int:
    """Return the positions of a split where results must not depend on the batch: at most 32 splits of a row."""
    wanted = -(-max_model_len // _FIXED_SPLITS)
    return max(_LEAST_FIXED_SPLIT, 1 << (wanted - 1).bit_length())


class AttentionPlan:
    """Owns the workspace, and how the rows of the current step are cut into pieces of work, a table per sight.

    One plan serves all layers with the same heads; layers are computed one after the other on one stream.
    """

    def __init__(
        self,
        device: Device,
        max_rows: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_model_len: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        *,
        fixed_splits: bool,
        value_dim: int | None = None,
        sights: Sequence[AttentionWindow] = (AttentionWindow(),),
    ) -> None:
        """Allocate. value_dim: None for ``head_dim``; sights: of all layers, once each.

        With ``fixed_splits`` the bits of a token do not depend on the batch or on how its prompt was cut into chunks.
        """
        value_dim = head_dim if value_dim is None else value_dim
        _check(num_heads, num_kv_heads, head_dim, value_dim, max_model_len, dtype, kv_dtype, sights)
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.max_model_len = max_model_len
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.group = num_heads // num_kv_heads
        self.sights = tuple(sights)
        self.plain = Kernel(
            "attention_plain", f"attention_plain_{_suffix(dtype, kv_dtype)}", "p" * 10 + "i" * 10 + "lfff"
        )
        self.matrix: MatrixKernels | None = None
        self._device = device
        if value_dim == head_dim and takes_matrix_kernels(dtype, kv_dtype, head_dim):
            self.matrix = MatrixKernels.of(dtype, kv_dtype, head_dim, device.max_shared_bytes)
            self._allocate(self.matrix, fixed_splits)

    def _allocate(self, kernels: MatrixKernels, fixed_splits: bool) -> None:
        device = self._device.torch_device
        self.split_size = fixed_split_size(self.max_model_len) if fixed_splits else None
        """Positions; None where the device chooses in every step."""
        self.split_tiles = _UNSPLIT_TILES if self.split_size is None else self.split_size // TILE
        self.decode_blocks = self._device.num_multiprocessors * kernels.decode_fit.blocks
        self.chunk_blocks = self._device.num_multiprocessors * kernels.chunk_fit.blocks
        self._decode_patches = self.decode_blocks * _DECODE_PATCHES_PER_BLOCK
        self._chunk_patches = self.chunk_blocks * _CHUNK_PATCHES_PER_BLOCK

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.decode_sums = numbers(self._decode_patches, DECODE_PATCH, self.head_dim)
        self.decode_stats = numbers(self._decode_patches, DECODE_PATCH, 2)
        self.chunk_sums = numbers(self._chunk_patches, kernels.chunk_patch, self.head_dim)
        self.chunk_stats = numbers(self._chunk_patches, kernels.chunk_patch, 2)
        # 0 between launches: whoever stores the last part of a patch sets its ticket back.
        self.decode_tickets = torch.zeros(self._decode_patches, dtype=torch.int32, device=device)
        self.chunk_tickets = torch.zeros(self._chunk_patches, dtype=torch.int32, device=device)
        self.totals = numbers(self.chunk_blocks, kernels.totals_per_block) if fixed_splits else None
        self._stride = 4 + 3 * self.max_rows + 1
        self.tables = torch.zeros((len(self.sights), 2, self._stride), dtype=torch.int32, device=device)
        numbers_of = [(sight.window or 0, sight.chunk or 0) for sight in self.sights]
        self._sights = torch.tensor(numbers_of, dtype=torch.int32, device=device)

    def reads_blocks_of(self, block_size: int) -> bool:
        """Whether blocks of so many positions are read: ``inverse_size`` in csrc/cuda/attention.cuh says what limits them."""
        if self.matrix is None:
            return block_size >= 1
        return block_size >= 2 and (self.max_model_len + 1) * block_size <= 1 << 32

    def table(self, sight: AttentionWindow, of_chunks: bool) -> torch.Tensor:
        """Return the table of a sight for one of the kernels; `ValueError` for a sight the plan was not made for."""
        if sight not in self.sights:
            raise ValueError(
                f"{sight} was not among those the plan was made for, {self.sights}: name all layers' sights"
            )
        return self.tables[self.sights.index(sight), int(of_chunks)]

    def prepare(self, rows: StepRows) -> None:
        """Cut the rows of a step into pieces of work, for all its layers. Launches; may be captured."""
        if rows.num_rows > self.max_rows or rows.num_tokens > self.max_tokens:
            raise ValueError(
                f"a step of {rows.num_rows} rows and {rows.num_tokens} tokens; the plan was made for {self.max_rows} and"
                f" {self.max_tokens}"
            )
        if self.matrix is None or rows.num_rows == 0:
            return
        self._device.launch(
            _PLAN,
            (len(self.sights), 2, 1),
            (_PLAN_THREADS, 1, 1),
            (
                rows.starts,
                rows.counts,
                self._sights,
                self.tables,
                rows.num_rows,
                self.max_rows,
                self._stride,
                self.group,
                self.num_kv_heads,
                self.matrix.chunk_patch,
                self.split_size or 0,
                self.decode_blocks,
                self.chunk_blocks,
                self._decode_patches,
                self._chunk_patches,
            ),
        )


def _suffix(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    return SUFFIXES[dtype] if dtype == kv_dtype else f"{SUFFIXES[dtype]}_fp8kv"


def _check(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    max_model_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    sights: Sequence[AttentionWindow],
) -> None:
    if dtype not in SUFFIXES or kv_dtype not in (dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"attention over {kv_dtype} for a model in {dtype}; the model is bf16, fp16 or fp32, and KV is in the same"
            " format or float8_e4m3fn"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not shared equally by {num_kv_heads} KV heads")
    if not (1 <= head_dim <= PLAIN_MAX_DIM and 1 <= value_dim <= PLAIN_MAX_VALUE_DIM):
        raise ValueError(
            f"heads of {head_dim} numbers in keys and {value_dim} in values; up to {PLAIN_MAX_DIM} and"
            f" {PLAIN_MAX_VALUE_DIM} are computed"
        )
    if max_model_len > MAX_POSITIONS:
        raise ValueError(f"max_model_len is {max_model_len}; at most {MAX_POSITIONS} positions are counted")
    if not sights or len(set(sights)) < len(sights):
        raise ValueError(f"sights are {sights}; each is named once")
