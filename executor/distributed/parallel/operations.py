"""Collective operations of ranks within a step, as operations of the compiled program."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.ops.host_attention import CAttention
from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.program.step import KvPlace
from quintet.executor.backends.cpu.program.values import Extent, Value
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import SUM_BYTES
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows in shared memory that other ranks read, with size and stride in bytes; also sent to ranks on other hosts."""

    address: int
    row_bytes: int
    stride: int
    for_first: bool = False
    """True if only the leader reads them."""


NOTHING = SharedRows(0, 0, 0)
"""No rows to send to other hosts."""


class RankOperations:
    """Appends collective operations. All ranks record the same ones in the same order."""

    def __init__(self, ranks: Ranks, program: int, dtype: torch.dtype, max_tokens: int) -> None:
        self._library = ranks.library
        self._ranks = ranks
        self._program = program
        self._code = FLOAT_CODES[dtype]
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._buffer = self._gathered = 0
        self._are_rows_read = False
        """True if the last read of expert rows is not yet followed by a barrier."""

    def linear(self, layer: Linear, x: Value, residual: Value | None, y: Value) -> None:
        """Append a linear layer with inputs divided over ranks: partial sums, a barrier, then the total on every rank.

        Every rank adds bias and residual once, to the total.
        """
        assert x.extent is Extent.TOKENS, "only logits have fewer rows, and their inputs are not divided"
        [run], library, ranks, width = layer.method.runs, self._library, self._ranks.handle, layer.width
        assert run.order is None, "inputs are divided before they are sorted"
        buffer = self._next_buffer()
        library.linear_sums(
            *(self._program, run.packed.handle, x.address, x.stride, self._max_tokens, self._code),
            *(library.sums(ranks, buffer, width), width, run.inputs),
        )
        self._add_sums(buffer, run.bias, residual, y)

    def experts(self, layer: Experts, x: Value, scores: Value, residual: Value | None, y: Value) -> None:
        """Append experts of which each rank has some, or some columns of each; all ranks select the same ones."""
        host, library = layer.host, self._library
        assert host is not None, "recorded without the host kernels"
        assert residual is None or residual.stride == y.stride, (residual, y)
        inputs = (host.address, x.address, x.stride, scores.address, scores.stride, self._max_tokens)
        if layer.kept.is_all:
            buffer = self._next_buffer()
            sums = library.sums(self._ranks.handle, buffer, y.width)
            library.experts_sums(self._program, *inputs, sums, y.width, self._code)
            self._add_sums(buffer, None, residual, y)
            return
        if self._are_rows_read:
            self.barrier(Extent.TOKENS)
        library.experts(
            *(self._program, self._ranks.handle, *inputs),
            *(None if residual is None else residual.address, y.address, y.stride, self._code),
        )
        self._are_rows_read = True

    def _next_buffer(self) -> int:
        buffer, self._buffer = self._buffer, 1 - self._buffer
        return buffer

    def _add_sums(self, buffer: int, bias: torch.Tensor | None, residual: Value | None, y: Value) -> None:
        library, ranks = self._library, self._ranks.handle
        assert residual is None or residual.stride == y.stride, (residual, y)
        row_bytes = y.width * SUM_BYTES
        self.barrier(Extent.TOKENS, SharedRows(library.sums(ranks, buffer, y.width), row_bytes, row_bytes))
        library.add_sums(
            *(self._program, ranks, buffer, y.width, None if bias is None else bias.data_ptr()),
            *(None if residual is None else residual.address, y.address, y.stride, self._code),
        )

    def next_gathered(self, width: int) -> torch.Tensor:
        """Return the next buffer for gathered columns, ``[max_tokens, width]``; call it in program order.

        Two buffers alternate: a barrier separates the last read of a buffer from its reuse.
        """
        buffer, self._gathered = self._gathered, 1 - self._gathered
        return self._ranks.gathered(buffer, width, self._dtype)

    def queries(self, width: int) -> torch.Tensor:
        """Return the memory of this rank's queries, ``width`` elements per token, next to those of ranks that share KV."""
        stripe = self._ranks.share.stripe
        both = self._ranks.queries(stripe.size * width, self._dtype)
        return both[:, stripe.index * width : (stripe.index + 1) * width]

    def attention(self, described: CAttention, queries: Value, place: KvPlace, y: Value) -> None:
        """Append attention over shared KV memory; a barrier must precede it."""
        stripe = self._ranks.share.stripe
        all_queries = self._ranks.queries(stripe.size * queries.width, self._dtype)
        self._library.attention(
            *(self._program, self._ranks.handle, ctypes.byref(described)),
            *(all_queries.data_ptr(), all_queries.stride(0), ctypes.byref(place)),
            *(y.address, y.stride, self._max_tokens),
        )

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of all ranks' logits ``[max_outputs, vocab]``, with each rank's columns adjacent."""
        return self._ranks.logits(dtype)

    def own_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``logits`` that this rank computes."""
        kept = self._ranks.share.of(logits.shape[1])
        return logits[:, kept.begin : kept.end]

    def barrier(self, extent: Extent, left: SharedRows = NOTHING) -> None:
        """Append a barrier. left: the rows that this rank contributes."""
        rows = (left.address, left.row_bytes, left.stride, left.for_first)
        self._library.barrier(self._program, self._ranks.handle, extent, *rows)
        self._are_rows_read = self._are_rows_read and extent is not Extent.TOKENS
