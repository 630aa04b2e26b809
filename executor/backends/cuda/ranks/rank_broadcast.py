"""Orders from rank 0 to the other ranks' devices: the same launches, in the same order, with the same words.

Every rank applies a plan's words to its own tables. The words contain positions and blocks, but no drawn tokens: each step
copies those from rank 0's device (`quintet.executor.backends.cuda.ranks.communicator`).
"""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import torch

from quintet.executor.backends.cpu.program.step import CStep
from quintet.executor.backends.cuda.graphs import GraphSize
from quintet.executor.backends.cuda.ops.tables import PackedPlan, Words
from quintet.executor.distributed.parallel.library import CRanksShape, OrderKind
from quintet.executor.distributed.parallel.ranks import SLOT_BYTES, Ranks
from quintet.executor.embeds import StepEmbeds
from quintet.executor.ragged import Int

DEPTH = 4
"""Parts of orders in flight. A step is one part, unless its prompts exceed about 60,000 tokens."""
LENGTH_BYTES = 8


class EmbedsOrder(msgspec.Struct, frozen=True, array_like=True):
    """See `StepEmbeds`."""

    tokens: bytes
    """int64"""
    vectors: bytes
    """Rows in the model's dtype."""


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Launch a packed plan."""

    words: bytes
    sizes: tuple[int, int, int, int]
    """num_rows, num_tokens, max_count and num_sampled of `PackedPlan`."""
    moves: tuple[int, int, int, int]
    """Word offsets: begin of swaps out, of swaps in, of copies, and end of copies."""
    graph_size: GraphSize | None
    """Size of the graph to replay; None for an eager step."""
    embeds: EmbedsOrder | None = None

    @property
    def packed(self) -> PackedPlan:
        """Rank 0's packed plan."""
        swaps_out, swaps_in, copies, end = self.moves
        return PackedPlan(
            *self.sizes,
            num_words=len(self.words) // 4,
            swaps_out=slice(swaps_out, swaps_in),
            swaps_in=slice(swaps_in, copies),
            copies=slice(copies, end),
            drafts=slice(0, 0),  # steps read the token table of rank 0 only
        )

    def step_embeds(self, dtype: torch.dtype, device: torch.device) -> StepEmbeds | None:
        """Return the input embeddings in the model's dtype, or None."""
        if self.embeds is None:
            return None
        tokens = torch.frombuffer(bytearray(self.embeds.tokens), dtype=torch.int64)
        vectors = torch.frombuffer(bytearray(self.embeds.vectors), dtype=dtype).view(len(tokens), -1)
        return StepEmbeds(tokens.to(device), vectors.to(device))


class LogitsOrder(msgspec.Struct, frozen=True, array_like=True, tag="logits"):
    """Compute logits of tokens of the last step."""

    tokens: bytes
    """int64: indices into the step's tokens."""


class CaptureOrder(msgspec.Struct, frozen=True, array_like=True, tag="capture"):
    """Capture the next graph."""


Order = StepOrder | LogitsOrder | CaptureOrder


def device_ranks_shape(num_ranks: int) -> CRanksShape:
    """Return the sizes of the shared host memory: orders and startup messages only; collectives use device memory."""
    shape = CRanksShape(ranks=num_ranks, depth=DEPTH, staging_bytes=num_ranks * SLOT_BYTES)
    shape.max_tokens = shape.max_rows = shape.max_outputs = shape.tables = shape.slots = 1
    shape.table_stride = shape.block_size = 1
    return shape


class RankBroadcaster:
    """Sender of the orders, in rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def step(
        self, words: Words, packed: PackedPlan, embeds: StepEmbeds | None, graph_size: GraphSize | None = None
    ) -> None:
        """Order a step with its block moves. graph_size: size of the graph to replay; None for an eager step."""
        embeds_order = None
        if embeds is not None:
            vectors = embeds.vectors.cpu().contiguous().view(torch.uint8)
            embeds_order = EmbedsOrder(embeds.tokens.cpu().numpy().tobytes(), vectors.numpy().tobytes())
        sizes = (packed.num_rows, packed.num_tokens, packed.max_count, packed.num_sampled)
        moves = (packed.swaps_out.start, packed.swaps_in.start, packed.copies.start, packed.copies.stop)
        self._send(StepOrder(words[: packed.num_words].tobytes(), sizes, moves, graph_size, embeds_order))

    def logits(self, tokens: Int) -> None:
        """Order logits of tokens of the last step."""
        self._send(LogitsOrder(np.ascontiguousarray(tokens, np.int64).tobytes()))

    def capture(self) -> None:
        """Order the capture of the next graph."""
        self._send(CaptureOrder())

    def _send(self, order: Order) -> None:
        encoded = msgspec.msgpack.encode(order)
        self._ranks.send_items(
            OrderKind.ON_DEVICE, len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded, 1
        )


class RankReceiver:
    """Receiver of the orders, in the other ranks; joins orders that arrive in parts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._no_step = CStep()

    def next(self) -> Order:
        received = bytearray(self._part())
        length = int.from_bytes(received[:LENGTH_BYTES], "little")
        while len(received) < LENGTH_BYTES + length:
            received += self._part()
        order: Order = self._decoder.decode(memoryview(received)[LENGTH_BYTES:])
        return order

    def _part(self) -> bytes:
        order = self._ranks.receive(ctypes.byref(self._no_step))
        assert order.kind == OrderKind.ON_DEVICE, order.kind
        part = self._ranks.items(order)
        self._ranks.done()
        return part
