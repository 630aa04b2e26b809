"""One rank's view of the shared memory: orders, notes, barriers, and the logits of all ranks; and the links of stages.

`quintet.executor.distributed.parallel.operations` has the collectives within a step.

Links connect each pipeline stage to the next, and the last to the first.

    stage 0 ── link 0: steps, hidden states ──▶ stage 1 ── … ──▶ stage M - 1
       ▲                                                             │
       └───────────────── link M - 1: logits ────────────────────────┘

A link is memory of two ranks without collectives. An order's payload is the input of the next stage. Two orders may
be in flight to a stage, so that it never waits between steps. As many orders as there are stages may be in flight to
the first stage, which takes logits when it needs them. It starts a step only after taking the logits of the step that
many before, which excludes a deadlock.

A link between two hosts has memory on both (`quintet.executor.distributed.hosts`); the stages work the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.distributed.parallel.library import (
    PAIR_BYTES,
    COrder,
    CRanksShape,
    Note,
    OrderKind,
    RanksMemory,
    open_ranks_library,
)
from quintet.executor.distributed.parallel.shapes import link_shape, shape_of, spec_of
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.share import Share, share_of
from quintet.wire.config import EngineConfig

SLOT_BYTES = 256
"""Size of a rank's message in `Ranks.all_gather`, length byte included. An NCCL unique id has 128 bytes."""
SPINS = 4000
"""Pauses of 10 to 50 ns before a waiting rank sleeps: about the typical skew of ranks within a step."""


class Ranks:
    """One rank's view, independent of the model. Rank 0, the leader, sends orders; the followers receive them."""

    def __init__(self, descriptor: int, share: Share, shape: CRanksShape, *, spins: int) -> None:
        """descriptor: of the memory, which every rank extends to the size of ``shape``; initially zero."""
        self.library = open_ranks_library()
        self.share = share
        self.shape = shape
        self._memory = RanksMemory(self.library, descriptor, shape)
        self.handle = self.library.new(ctypes.byref(shape), self._memory.address, share.rank, spins)
        self._order = COrder()

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of all ranks' logits ``[max_outputs, vocab]``."""
        width = self.shape.logits_row_bytes // dtype.itemsize
        return self._rows(self.library.logits(self.handle), self.shape.max_outputs, width, dtype)

    def rotated(self, first: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of rotations ``[max_tokens, width]``, after ``first`` elements per token of other rotations."""
        begin = self.shape.max_tokens * first * dtype.itemsize
        return self._rows(self.library.rotated(self.handle) + begin, self.shape.max_tokens, width, dtype)

    def gathered(self, buffer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of gathered columns ``[max_tokens, width]``. buffer: buffer index, 0 or 1."""
        address = self.library.gathered(self.handle, buffer, width * dtype.itemsize)
        return self._rows(address, self.shape.max_tokens, width, dtype)

    def payload(self, width: int, dtype: torch.dtype, begin: int = 0) -> torch.Tensor:
        """Return the payload rows, of ``width`` elements, of the leader's next order or of the last received order.

        begin: first byte of the rows.
        """
        rows = (self.shape.payload_bytes - begin) // (width * dtype.itemsize)
        return self._rows(self.library.payload(self.handle) + begin, rows, width, dtype)

    def staging(self) -> torch.Tensor:
        """Return the staging buffer, uint8, for weights copied between ranks."""
        return self._rows(self.library.staging(self.handle), 1, self.shape.staging_bytes, torch.uint8)[0]

    def kv_blocks(self, width: int) -> torch.Tensor:
        """Return the shared KV memory, uint8 ``[blocks, width]``."""
        address = self.library.kv(self.handle, self.share.kv_copy)
        return self._rows(address, self.shape.kv_bytes // width, width, torch.uint8)

    def queries(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory ``[max_tokens, width]`` of the queries of all ranks that share KV memory."""
        address = self.library.queries(self.handle, self.share.kv_copy, width * dtype.itemsize)
        return self._rows(address, self.shape.max_tokens, width, dtype)

    def all_gather(self, own: bytes) -> list[bytes]:
        """All-gather: return every rank's message by rank. Collective. Less than `SLOT_BYTES` bytes; uses ``staging``."""
        slots = self.staging().view(self.share.size, SLOT_BYTES)
        assert len(own) < SLOT_BYTES, own
        mine = bytes([len(own)]) + own
        slots[self.share.rank, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.barrier()
        messages = [bytes(slot[1 : 1 + int(slot[0])].tolist()) for slot in slots]
        self.barrier()  # all ranks have read the messages
        return messages

    def all_agree(self, own: bool) -> bool:
        """Return whether all ranks pass True. Collective."""
        return all(map(any, self.all_gather(bytes([own]))))

    def broadcast_from_first(self, own: bytes) -> bytes:
        """Broadcast: return the leader's message, of any length; the followers' arguments are ignored. Collective."""
        most = SLOT_BYTES - 1
        length = int.from_bytes(self.all_gather(len(own).to_bytes(8, "little"))[0], "little")
        return b"".join(self.all_gather(own[at : at + most])[0] for at in range(0, length, most))

    def barrier(self) -> None:
        """Barrier: wait until all ranks have arrived. Collective."""
        self.library.barrier_now(self.handle)

    def make_room(self) -> None:
        """On the leader: wait until another order, with its payload, fits."""
        self.library.make_room(self.handle)

    def wait_for_sent(self, orders: int) -> None:
        """Wait until ``orders`` orders were sent, without receiving one. Any thread may call it; others continue to run."""
        self.library.wait_for_sent(self.handle, orders)

    def note(self, what: Note, value: int) -> None:
        """Set a note about this rank for the other ranks. Any thread may call it."""
        self.library.note(self.handle, what, value)

    def noted(self, what: Note) -> int:
        """Return the sum of the other ranks' notes. Any thread may call it."""
        return int(self.library.noted(self.handle, what))

    def _rows(self, address: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        offset = address - self._memory.address
        flat = torch.frombuffer(self._memory.mapped, dtype=dtype, count=rows * width, offset=offset)
        return flat.view(rows, width)

    def send_run(self, step: object, begin: int, end: int, length: int) -> None:
        """Send an order to run operations ``[begin, end)`` over a step. length: its largest position plus 1."""
        order = self._order
        order.kind, order.begin, order.end, order.length = OrderKind.RUN, begin, end, length
        self.library.send(self.handle, ctypes.byref(order), step)

    def send_items(self, kind: OrderKind, items: bytes, item_bytes: int) -> None:
        """Send an order with items of one size, split into as many orders as needed."""
        for part in self._parts(items, item_bytes):
            self._send_part(kind, part)

    def move_blocks(self, kind: OrderKind, pairs: bytes, move: Callable[[bytes], None]) -> None:
        """On the leader: make all ranks move blocks; ``move`` does so on this rank. See `wait_for_moved`."""
        for part in self._parts(pairs, PAIR_BYTES):
            self._send_part(kind, part)
            try:
                move(part)
            finally:  # the followers enter the barrier in any case
                self.wait_for_moved()

    def wait_for_moved(self) -> None:
        """Wait until all ranks have moved blocks if they share KV memory: a rank may overwrite the source of another."""
        if not self.share.stripe.is_alone:
            self.barrier()

    def _parts(self, items: bytes, item_bytes: int) -> Iterator[bytes]:
        most = self.library.item_ints * 4 // item_bytes * item_bytes
        assert most, item_bytes
        return (items[begin : begin + most] for begin in range(0, len(items), most))

    def _send_part(self, kind: OrderKind, part: bytes) -> None:
        self.make_room()  # the memory of earlier items may still be read
        ctypes.memmove(self.library.items(self.handle), part, len(part))
        self._send(kind, len(part))

    def send_done(self, outputs: int, tokens: int) -> None:
        """Report a step as finished; the payload contains logits of ``outputs``, and hidden states of ``tokens``, if any."""
        self._order.num_outputs, self._order.num_tokens = outputs, tokens
        self._send(OrderKind.RUN, 0)

    def send_idle_task(self) -> None:
        """Send an order to run an idle task."""
        self._send(OrderKind.IDLE_TASK, 0)

    def _send(self, kind: OrderKind, end: int) -> None:
        order = self._order
        order.kind, order.begin, order.end, order.length = kind, 0, end, 0
        self.library.send(self.handle, ctypes.byref(order), None)

    def wait_for_all(self) -> None:
        """Wait until all followers have finished their orders; at first, until they are ready."""
        self.library.wait_for_all(self.handle)

    def receive(self, step: object) -> COrder:
        """Wait for the next order and return it. step: a `CStep` that a run order's step is written to."""
        self.library.receive(self.handle, ctypes.byref(self._order), step)
        return self._order

    def items(self, order: COrder) -> bytes:
        return ctypes.string_at(self.library.items(self.handle), order.end)

    def done_with(self, orders: int) -> None:
        """Report ``orders`` orders as finished."""
        self.library.done_with(self.handle, orders)

    def wait_for_done(self, orders: int) -> None:
        """On the leader: wait until all followers have finished ``orders`` orders. Any thread may call it."""
        self.library.wait_for_done(self.handle, orders)

    def done(self) -> None:
        """Report the last order as finished; at first, report ready."""
        self.library.done(self.handle)


def vector_records(width: int, dtype: torch.dtype) -> np.dtype[np.void]:
    """Return the record type of `OrderKind.EMBEDS` items: index of a token in the step, and its vector's bytes."""
    return np.dtype([("token", np.int32), ("vector", np.uint8, (width * dtype.itemsize,))])


def input_place(max_tokens: int, width: int, dtype: torch.dtype, ranks: Ranks | None) -> torch.Tensor:
    """Return the memory of a stage's input ``[max_tokens, width]``, which all ranks of the stage read."""
    if ranks is not None:
        return ranks.payload(width, dtype)
    return lazy_zeros((max_tokens, width), dtype, torch.device("cpu"))


SENDER, RECEIVER = Share(0, 2), Share(1, 2)


@dataclass(frozen=True, slots=True)
class Links:
    """The two links of one stage."""

    preceding: Ranks
    """Receives from the previous stage."""
    following: Ranks
    """Sends to the next stage."""


def share_of_rank(config: EngineConfig, rank: int) -> Share:
    """Return the share of a rank of a divisible model."""
    return share_of(config.executor, rank, spec_of(config.model))


def open_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Return the view of a rank with assigned processors. descriptor: memory of its stage's ranks."""
    return Ranks(descriptor, share_of_rank(config, rank), shape_of(config), spins=_spins(config))


def open_links(config: EngineConfig, descriptors: Sequence[int], stage: int) -> Links:
    """Return the link views of a stage's first rank."""
    ends = ((stage - 1) % len(descriptors), RECEIVER), (stage, SENDER)
    preceding, following = (
        Ranks(descriptors[link], end, link_shape(config, link), spins=_spins(config)) for link, end in ends
    )
    return Links(preceding, following)


def _spins(config: EngineConfig) -> int:
    return SPINS if config.executor.has_own_cores else 0
