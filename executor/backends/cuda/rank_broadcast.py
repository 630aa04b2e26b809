"""What rank 0 has the other ranks' devices do: the same launches in the same order, over the same words.

A plan's words go to every rank, which spreads them over tables of its own, since positions and blocks are all in them. What they
do not have is drawn tokens: those each step takes from rank 0's device (`quintet.executor.backends.cuda.group`).
"""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import torch

from quintet.executor.backends.cpu.program.step import CStep
from quintet.executor.backends.cuda.ops.tables import PackedPlan, Words
from quintet.executor.batch import Int
from quintet.executor.distributed.parallel.library import CRanksShape, OrderKind
from quintet.executor.distributed.parallel.ranks import SLOT_BYTES, Ranks
from quintet.executor.embeds import StepEmbeds

DEPTH = 4
"""Parts of orders that may be under way: a step is one, but for prompts of some 60,000 tokens at once."""
LENGTH_BYTES = 8


class EmbedsOrder(msgspec.Struct, frozen=True, array_like=True):
    """See `StepEmbeds`."""

    tokens: bytes
    """int64"""
    vectors: bytes
    """Rows in the model's number format."""


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Launch a packed plan."""

    words: bytes
    sizes: tuple[int, int, int, int]
    """`PackedPlan`'s rows, tokens, most of a row, and rows that draw."""
    moves: tuple[int, int, int, int]
    """Where swaps out begin, swaps in, copies, and where these end."""
    graph_rows: int | None
    """The size of the graph that is replayed; None for a step that is launched kernel by kernel."""
    embeds: EmbedsOrder | None = None

    @property
    def packed(self) -> PackedPlan:
        """What rank 0 has packed."""
        swaps_out, swaps_in, copies, end = self.moves
        return PackedPlan(
            *self.sizes,
            num_words=len(self.words) // 4,
            swaps_out=slice(swaps_out, swaps_in),
            swaps_in=slice(swaps_in, copies),
            copies=slice(copies, end),
        )

    def step_embeds(self, dtype: torch.dtype, device: torch.device) -> StepEmbeds | None:
        """Return the vectors of tokens without ids, in the model's dtype."""
        if self.embeds is None:
            return None
        tokens = torch.frombuffer(bytearray(self.embeds.tokens), dtype=torch.int64)
        vectors = torch.frombuffer(bytearray(self.embeds.vectors), dtype=dtype).view(len(tokens), -1)
        return StepEmbeds(tokens.to(device), vectors.to(device))


class LogitsOrder(msgspec.Struct, frozen=True, array_like=True, tag="logits"):
    """Make logits of tokens of the last step again."""

    tokens: bytes
    """int64: indexes among the step's."""


class CaptureOrder(msgspec.Struct, frozen=True, array_like=True, tag="capture"):
    """Capture the next graph."""


Order = StepOrder | LogitsOrder | CaptureOrder


def device_ranks_shape(num_ranks: int) -> CRanksShape:
    """Return what ranks need room for whose sums and logits lie in memory of their devices: orders, and words at boot."""
    shape = CRanksShape(ranks=num_ranks, depth=DEPTH, staging_bytes=num_ranks * SLOT_BYTES)
    shape.max_tokens = shape.max_rows = shape.max_outputs = shape.tables = shape.slots = 1
    shape.table_stride = shape.block_size = 1
    return shape


class RankBroadcaster:
    """Rank 0, which tells the others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def step(
        self, words: Words, packed: PackedPlan, embeds: StepEmbeds | None, graph_rows: int | None = None
    ) -> None:
        """Have a step launched, behind the moves of its blocks; as the graph of so many rows, if that is said."""
        given = None
        if embeds is not None:
            vectors = embeds.vectors.cpu().contiguous().view(torch.uint8)
            given = EmbedsOrder(embeds.tokens.cpu().numpy().tobytes(), vectors.numpy().tobytes())
        sizes = (packed.num_rows, packed.num_tokens, packed.max_count, packed.num_sampled)
        moves = (packed.swaps_out.start, packed.swaps_in.start, packed.copies.start, packed.copies.stop)
        self._tell(StepOrder(words[: packed.num_words].tobytes(), sizes, moves, graph_rows, given))

    def logits(self, tokens: Int) -> None:
        """Have logits made again."""
        self._tell(LogitsOrder(np.ascontiguousarray(tokens, np.int64).tobytes()))

    def capture(self) -> None:
        """Have a graph captured."""
        self._tell(CaptureOrder())

    def _tell(self, order: Order) -> None:
        encoded = msgspec.msgpack.encode(order)
        self._ranks.tell_mail(OrderKind.ON_DEVICE, len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded, 1)


class RankReceiver:
    """Another rank, which hears orders that may come in parts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._no_step = CStep()

    def next(self) -> Order:
        """Wait for the next order."""
        told = bytearray(self._part())
        length = int.from_bytes(told[:LENGTH_BYTES], "little")
        while len(told) < LENGTH_BYTES + length:
            told += self._part()
        order: Order = self._decoder.decode(memoryview(told)[LENGTH_BYTES:])
        return order

    def _part(self) -> bytes:
        order = self._ranks.hear(ctypes.byref(self._no_step))
        assert order.kind == OrderKind.ON_DEVICE, order.kind
        part = self._ranks.mail(order)
        self._ranks.done()
        return part
