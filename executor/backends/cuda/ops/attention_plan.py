"""Attention kernels of a model with their shared memory, workspace and per-step plan.

Owns the buffers. Only the device reads and writes the plan (csrc/cuda/attention_plan.cu).

Workspace: ``P * query_tile * (head_dim + 2) * 4`` bytes for ``P`` query tiles, 8 per resident decode block and 2 per chunk block.
With a head_dim of 128 and 132 multiprocessors that is 17 and 34 MiB. It suffices for every step: the planner only selects splits
that fit. With fixed splits, chunk blocks need 18 MiB more for the totals of splits that they process in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.models.layers.attention import AttentionLayer, AttentionWindow
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

TILE = 64
"""Positions of a tile; all split sizes are multiples of it."""
DECODE_QUERY_TILE = 16
"""Queries ((new token, query head) pairs of a KV head) that a block of the decode kernel computes: one matrix tile."""
MATRIX_DIMS = (64, 128, 256)
"""Head dimensions of the matrix kernels; other dimensions are padded to the next one."""
PLAIN_MAX_DIM, PLAIN_MAX_VALUE_DIM = 576, 512
MAX_POSITIONS = 1 << 22
THREADS = 128
_PLAN_THREADS = 1024
_MAX_STAGES = 8
_FIXED_SPLITS = 32
_MIN_FIXED_SPLIT = 256
_DECODE_QUERY_TILES_PER_BLOCK = 8
_CHUNK_QUERY_TILES_PER_BLOCK = 2
_UNSPLIT_TILES = 1 << 30
_PLAN = Kernel("attention_plan", "attention_plan", "ppppiiiiiiiiiii")
_MATRIX_KINDS = "p" * 15 + "i" * 13 + "llfff"


@dataclass(frozen=True, slots=True)
class Fit:
    """Occupancy of one kernel."""

    blocks: int
    """Resident blocks per multiprocessor."""
    stages: int
    """Units of the ring buffer: 64 keys or 64 values each."""
    shared_bytes: int
    """Dynamic shared memory of a block."""

    @classmethod
    def of(cls, max_shared_bytes: int, fixed_bytes: int, unit_bytes: int) -> Fit:
        """Fit two blocks with at least four units each, or one block.

        Static variables and the driver's reservation take 1 KiB per block (CUDA C++ Programming Guide, "Shared Memory");
        ``max_shared_bytes`` is the dynamic limit of one block.
        """
        half = (max_shared_bytes + 1024) // 2 - 1024
        for blocks, available, min_stages in ((2, half, 4), (1, max_shared_bytes, 2)):
            stages = min(_MAX_STAGES, (available - 128 - fixed_bytes) // unit_bytes)
            if stages >= min_stages:
                return cls(blocks, stages, fixed_bytes + stages * unit_bytes)
        raise ValueError(
            f"attention needs {fixed_bytes + 2 * unit_bytes + 128} bytes of shared memory per block; the device has"
            f" {max_shared_bytes}"
        )


@dataclass(slots=True)
class MatrixKernel:
    """A kernel for one head dimension and dtype, with its workspace."""

    kernel: Kernel
    fit: Fit
    blocks: int
    """Resident blocks of the device."""
    query_tile: int
    num_query_tiles: int
    """Query tiles with splits that the workspace holds."""
    sums: torch.Tensor
    stats: torch.Tensor
    tickets: torch.Tensor
    """0 between launches: the block that stores the last part of a query tile resets its ticket."""
    totals: torch.Tensor | None = None
    """fp32 values that a block keeps of its earlier splits; only with fixed splits of chunks."""

    @classmethod
    def allocate(
        cls, device: Device, kernel: Kernel, fit: Fit, query_tile: int, head_dim: int, tiles_per_block: int
    ) -> MatrixKernel:
        """Allocate the workspace. tiles_per_block: query tiles per resident block."""
        blocks = device.num_multiprocessors * fit.blocks
        num_tiles = blocks * tiles_per_block

        def floats(width: int) -> torch.Tensor:
            return torch.empty(
                (num_tiles, query_tile, width), dtype=torch.float32, device=device.torch_device
            )

        tickets = torch.zeros(num_tiles, dtype=torch.int32, device=device.torch_device)
        return cls(kernel, fit, blocks, query_tile, num_tiles, floats(head_dim), floats(2), tickets)


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """Kernels for one head dimension and dtype."""

    decode: MatrixKernel
    chunk: MatrixKernel

    @classmethod
    def allocate(
        cls, device: Device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, *, fixed_splits: bool
    ) -> MatrixKernels:
        """Return the kernels. `supports_matrix_kernels` must hold."""
        dim = next(width for width in MATRIX_DIMS if width >= head_dim)
        suffix = _suffix(dtype, kv_dtype)
        row = 2 * dim + 16
        widens = kv_dtype == torch.float8_e4m3fn
        unit, wide = (TILE * dim, 2 * TILE * row) if widens else (TILE * row, 0)
        tiles_per_warp = 1 if dim > 128 else 2
        query_tile = 64 * tiles_per_warp
        weights, largest = DECODE_QUERY_TILE * (2 * TILE + 16), 4 * DECODE_QUERY_TILE * 4
        decode_bytes = DECODE_QUERY_TILE * row + weights + largest + wide

        def kernel(name: str, fixed_bytes: int, tile: int, tiles_per_block: int) -> MatrixKernel:
            fit = Fit.of(device.max_shared_bytes, fixed_bytes, unit)
            compiled = Kernel(f"attention_{name}", f"attention_{name}_{dim}_{suffix}", _MATRIX_KINDS)
            return MatrixKernel.allocate(device, compiled, fit, tile, head_dim, tiles_per_block)

        decode = kernel("decode", decode_bytes, DECODE_QUERY_TILE, _DECODE_QUERY_TILES_PER_BLOCK)
        chunk = kernel("chunk", query_tile * row + wide, query_tile, _CHUNK_QUERY_TILES_PER_BLOCK)
        if fixed_splits:
            totals_per_block = tiles_per_warp * 2 * (dim // 4 + 2) * THREADS
            chunk.totals = chunk.sums.new_empty(chunk.blocks, totals_per_block)
        return cls(decode, chunk)


def supports_matrix_kernels(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the matrix kernels support the layer: 16-bit dtypes, and cache rows of whole 16-byte copies."""
    elements_per_copy = 16 // kv_dtype.itemsize
    return dtype.itemsize == 2 and head_dim <= MATRIX_DIMS[-1] and head_dim % elements_per_copy == 0


def fixed_split_size(max_model_len: int) -> int:
    """Return the positions of a fixed split, for batch-invariant results: at most 32 splits of a row."""
    size = -(-max_model_len // _FIXED_SPLITS)
    return max(_MIN_FIXED_SPLIT, 1 << (size - 1).bit_length())


class AttentionPlan:
    """Workspace, and the division of the current step's rows into work items, one table per attention window.

    All layers with the same heads share a plan; layers run in sequence on one stream.
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
        attention_windows: Sequence[AttentionWindow] = (AttentionWindow(),),
    ) -> None:
        """Allocate. value_dim: None for ``head_dim``; attention_windows: the distinct windows of all layers.

        With ``fixed_splits`` the bits of a token do not depend on the batch or on the chunking of its prompt.
        """
        value_dim = head_dim if value_dim is None else value_dim
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.max_model_len = max_model_len
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.attention_windows = tuple(attention_windows)
        self._check()
        self.group = num_heads // num_kv_heads
        self.plain = Kernel(
            "attention_plain", f"attention_plain_{_suffix(dtype, kv_dtype)}", "p" * 10 + "i" * 10 + "lfff"
        )
        self.matrix: MatrixKernels | None = None
        self._device = device
        if value_dim == head_dim and supports_matrix_kernels(dtype, kv_dtype, head_dim):
            self.matrix = MatrixKernels.allocate(device, dtype, kv_dtype, head_dim, fixed_splits=fixed_splits)
            self._allocate_tables(fixed_splits)

    def _check(self) -> None:
        """Raise `ValueError` for an unsupported model."""
        if self.dtype not in SUFFIXES or self.kv_dtype not in (self.dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"the model is {self.dtype} and the KV cache {self.kv_dtype}; expected a bf16, fp16 or fp32 model, and a KV"
                " cache of the same dtype or float8_e4m3fn"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not (1 <= self.head_dim <= PLAIN_MAX_DIM and 1 <= self.value_dim <= PLAIN_MAX_VALUE_DIM):
            raise ValueError(
                f"head dimensions are {self.head_dim} (keys) and {self.value_dim} (values); at most {PLAIN_MAX_DIM} and"
                f" {PLAIN_MAX_VALUE_DIM} are supported"
            )
        if self.max_model_len > MAX_POSITIONS:
            raise ValueError(f"max_model_len is {self.max_model_len}; at most {MAX_POSITIONS} is supported")
        if not self.attention_windows or len(set(self.attention_windows)) < len(self.attention_windows):
            raise ValueError(
                f"attention_windows are {self.attention_windows}; expected at least one, without duplicates"
            )

    def _allocate_tables(self, fixed_splits: bool) -> None:
        device = self._device.torch_device
        self.split_size = fixed_split_size(self.max_model_len) if fixed_splits else None
        """Positions; None: the device selects it in every step."""
        self.split_tiles = _UNSPLIT_TILES if self.split_size is None else self.split_size // TILE
        self._stride = 4 + 3 * self.max_rows + 1
        self.tables = torch.zeros(
            (len(self.attention_windows), 2, self._stride), dtype=torch.int32, device=device
        )
        limits = [(each.window or 0, each.chunk or 0) for each in self.attention_windows]
        self._window_limits = torch.tensor(limits, dtype=torch.int32, device=device)

    def supports_block_size(self, block_size: int) -> bool:
        """Return whether the kernels support the block size; the limit is ``inverse_size`` in csrc/cuda/attention.cuh."""
        if self.matrix is None:
            return block_size >= 1
        return block_size >= 2 and (self.max_model_len + 1) * block_size <= 1 << 32

    def table(self, attention_window: AttentionWindow, for_chunks: bool) -> torch.Tensor:
        """Return the table of a window for the decode or the chunk kernel; `ValueError` for an unknown window."""
        if attention_window not in self.attention_windows:
            raise ValueError(
                f"{attention_window} is not a window of the plan, {self.attention_windows}: pass the windows of all layers"
            )
        return self.tables[self.attention_windows.index(attention_window), int(for_chunks)]

    def prepare(self, rows: StepRows) -> None:
        """Launch the division of a step's rows into work items, for all layers; may be captured."""
        if rows.num_rows > self.max_rows or rows.num_tokens > self.max_tokens:
            raise ValueError(
                f"the step has {rows.num_rows} rows and {rows.num_tokens} tokens; the plan allows {self.max_rows} and"
                f" {self.max_tokens}"
            )
        if self.matrix is None or rows.num_rows == 0:
            return
        decode, chunk = self.matrix.decode, self.matrix.chunk
        self._device.launch(
            _PLAN,
            (len(self.attention_windows), 2, 1),
            (_PLAN_THREADS, 1, 1),
            (
                *(rows.starts, rows.counts, self._window_limits, self.tables),
                *(rows.num_rows, self.max_rows, self._stride, self.group, self.num_kv_heads),
                *(chunk.query_tile, self.split_size or 0, decode.blocks, chunk.blocks),
                *(decode.num_query_tiles, chunk.num_query_tiles),
            ),
        )


def _suffix(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    return SUFFIXES[dtype] if dtype == kv_dtype else f"{SUFFIXES[dtype]}_fp8kv"


class AttentionPlans:
    """Plans of a model: one per head configuration of its layers."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[AttentionLayer],
        config: EngineConfig,
        max_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        """Allocate for steps of up to ``max_tokens``. Raises `ConfigError` for an unsupported block size."""
        self._plans = {
            heads: AttentionPlan(
                device,
                config.scheduler.max_num_seqs,
                max_tokens,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                config.model.max_model_len,
                dtype,
                kv_dtype,
                fixed_splits=config.executor.batch_invariant,
                value_dim=heads.value_width,
                attention_windows=tuple(
                    dict.fromkeys(layer.attention_window for layer in layers if layer.heads == heads)
                ),
            )
            for heads in dict.fromkeys(layer.heads for layer in layers)
        }
        block_size = config.model.kv.block_size
        if not all(plan.supports_block_size(block_size) for plan in self._plans.values()):
            raise ConfigError(
                f"the block size is {block_size} tokens, which the GPU kernels do not support for sequences of"
                f" {config.model.max_model_len} tokens: set --block-size 16, or another size of at least 2"
            )

    def of(self, layer: AttentionLayer) -> AttentionPlan:
        return self._plans[layer.heads]

    @property
    def only(self) -> AttentionPlan | None:
        """The plan, if all layers share one; None otherwise."""
        return next(iter(self._plans.values())) if len(self._plans) == 1 else None

    def prepare(self, rows: StepRows) -> None:
        for plan in self._plans.values():
            plan.prepare(rows)
