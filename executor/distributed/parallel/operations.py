"""What ranks do together in the middle of a step, as operations of the compiled program."""

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
    """Rows of so many bytes, so far apart, where the others read them: carried to those that are on other hosts."""

    address: int
    row_bytes: int
    stride: int
    for_first: bool = False
    """Whether rank 0 alone reads them."""


NOTHING = SharedRows(0, 0, 0)
"""What lies in memory that ranks on several hosts do not have in common."""


class RankOperations:
    """Appends them. All ranks record the same ones, in the same order."""

    def __init__(self, ranks: Ranks, program: int, dtype: torch.dtype, max_tokens: int) -> None:
        self._library = ranks.library
        self._ranks = ranks
        self._program = program
        self._code = FLOAT_CODES[dtype]
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._turn = self._gathered = 0
        self._are_rows_read = False
        """Whether nobody has been met since the rows of experts were read."""

    def linear(self, layer: Linear, x: Value, residual: Value | None, y: Value) -> None:
        """Append a layer of whose inputs each rank has some: its own sums, then a meeting, then everybody's sums.

        Bias and residual are added where the sums are whole: once, by every rank alike.
        """
        assert x.extent is Extent.TOKENS, (
            "only logits are made of fewer rows, and their inputs are not divided"
        )
        [run], library, ranks, width = layer.method.runs, self._library, self._ranks.handle, layer.width
        assert run.order is None, "inputs are divided before they are sorted"
        turn = self._next_turn()
        library.linear_sums(
            *(self._program, run.packed.handle, x.address, x.stride, self._max_tokens, self._code),
            *(library.sums(ranks, turn, width), width, run.inputs),
        )
        self._add_sums(turn, run.bias, residual, y)

    def experts(self, layer: Experts, x: Value, scores: Value, residual: Value | None, y: Value) -> None:
        """Append experts of which each rank has some, or some columns of each; all ranks choose alike."""
        host, library = layer.host, self._library
        assert host is not None, "recorded without the host kernels"
        assert residual is None or residual.stride == y.stride, (residual, y)
        inputs = (host.address, x.address, x.stride, scores.address, scores.stride, self._max_tokens)
        if layer.kept.is_all:
            turn = self._next_turn()
            sums = library.sums(self._ranks.handle, turn, y.width)
            library.experts_sums(self._program, *inputs, sums, y.width, self._code)
            self._add_sums(turn, None, residual, y)
            return
        if self._are_rows_read:
            self.meet(Extent.TOKENS)
        library.experts(
            *(self._program, self._ranks.handle, *inputs),
            *(None if residual is None else residual.address, y.address, y.stride, self._code),
        )
        self._are_rows_read = True

    def _next_turn(self) -> int:
        turn, self._turn = self._turn, 1 - self._turn
        return turn

    def _add_sums(self, turn: int, bias: torch.Tensor | None, residual: Value | None, y: Value) -> None:
        library, ranks = self._library, self._ranks.handle
        assert residual is None or residual.stride == y.stride, (residual, y)
        row_bytes = y.width * SUM_BYTES
        self.meet(Extent.TOKENS, SharedRows(library.sums(ranks, turn, y.width), row_bytes, row_bytes))
        library.add_sums(
            *(self._program, ranks, turn, y.width, None if bias is None else bias.data_ptr()),
            *(None if residual is None else residual.address, y.address, y.stride, self._code),
        )

    def next_gathered(self, width: int) -> torch.Tensor:
        """Return where all ranks put together what comes next, ``[max_tokens, width]``; asked in the order of the program.

        There are two places: by the time the first is wanted again, everybody has met behind having read it.
        """
        turn, self._gathered = self._gathered, 1 - self._gathered
        return self._ranks.gathered(turn, width, self._dtype)

    def queries(self, width: int) -> torch.Tensor:
        """Return where this rank's queries lie, of ``width`` numbers a token: beside those of ranks that keep KV with it."""
        turn = self._ranks.share.turn
        both = self._ranks.queries(turn.size * width, self._dtype)
        return both[:, turn.index * width : (turn.index + 1) * width]

    def attention(self, described: CAttention, queries: Value, place: KvPlace, y: Value) -> None:
        """Append attention over keys and values that ranks keep together; behind a meeting."""
        turn = self._ranks.share.turn
        all_queries = self._ranks.queries(turn.size * queries.width, self._dtype)
        self._library.attention(
            *(self._program, self._ranks.handle, ctypes.byref(described)),
            *(all_queries.data_ptr(), all_queries.stride(0), ctypes.byref(place)),
            *(y.address, y.stride, self._max_tokens),
        )

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of all ranks' logits ``[max_outputs, vocab]``, each rank's columns side by side."""
        return self._ranks.logits(dtype)

    def own_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """Return those of them that this rank makes."""
        kept = self._ranks.share.of(logits.shape[1])
        return logits[:, kept.begin : kept.end]

    def meet(self, extent: Extent, left: SharedRows = NOTHING) -> None:
        """Append a meeting. left: what this rank has made for it."""
        rows = (left.address, left.row_bytes, left.stride, left.for_first)
        self._library.meet(self._program, self._ranks.handle, extent, *rows)
        self._are_rows_read = self._are_rows_read and extent is not Extent.TOKENS
