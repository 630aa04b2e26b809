"""The memory that ranks share, seen from one of them: how orders pass, and where all ranks' logits lie.

Knows no model. What the ranks do together in the middle of a step is in `quintet.executor.distributed.parallel.operations`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

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
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.share import Share

SLOT_BYTES = 256
"""Of what a rank says to all others at boot: up to so many less one. A unique id of NCCL's is 128."""
SPINS = 4000
"""Pauses of some 10 to 50 ns before a wait sleeps: about as long as one rank is behind another within a step."""


class Ranks:
    """One rank's view. Rank 0 tells orders, the others hear them."""

    def __init__(self, descriptor: int, share: Share, shape: CRanksShape, *, spins: int) -> None:
        """descriptor: of the memory, which every rank makes as large as ``shape`` says; what it holds begins with zeros."""
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
        """Return the memory ``[max_tokens, width]`` of rotations, behind so many numbers a token of others."""
        begin = self.shape.max_tokens * first * dtype.itemsize
        return self._rows(self.library.rotated(self.handle) + begin, self.shape.max_tokens, width, dtype)

    def gathered(self, turn: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory ``[max_tokens, width]`` of what ranks put together in this turn, 0 or 1."""
        address = self.library.gathered(self.handle, turn, width * dtype.itemsize)
        return self._rows(address, self.shape.max_tokens, width, dtype)

    def payload(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of ``width`` numbers in what comes with the order that rank 0 tells next, or that another has heard."""
        rows = self.shape.payload_bytes // (width * dtype.itemsize)
        return self._rows(self.library.payload(self.handle), rows, width, dtype)

    def staging(self) -> torch.Tensor:
        """Return the memory, uint8, of weights on their way from one rank to another."""
        return self._rows(self.library.staging(self.handle), 1, self.shape.staging_bytes, torch.uint8)[0]

    def kv_blocks(self, width: int) -> torch.Tensor:
        """Return the KV memory, uint8 ``[blocks, width]``, that this rank keeps together with others."""
        address = self.library.kv(self.handle, self.share.kv_copy)
        return self._rows(address, self.shape.kv_bytes // width, width, torch.uint8)

    def queries(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory ``[max_tokens, width]`` of the queries of all ranks that keep KV together with this one."""
        address = self.library.queries(self.handle, self.share.kv_copy, width * dtype.itemsize)
        return self._rows(address, self.shape.max_tokens, width, dtype)

    def exchange(self, own: bytes) -> list[bytes]:
        """Return what every rank says here, in their order: all ranks, as often. Up to `SLOT_BYTES` less one; in ``staging``."""
        slots = self.staging().view(self.share.size, SLOT_BYTES)
        assert len(own) < SLOT_BYTES, own
        mine = bytes([len(own)]) + own
        slots[self.share.rank, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.meet()
        told = [bytes(slot[1 : 1 + int(slot[0])].tolist()) for slot in slots]
        self.meet()  # everybody has read them
        return told

    def all_say(self, own: bool) -> bool:
        """Return whether every rank says so here: all ranks, as often."""
        return all(map(any, self.exchange(bytes([own]))))

    def as_first_says(self, own: bytes) -> bytes:
        """Return what rank 0 says here, of any length: all ranks, as often. What others say is not looked at."""
        most = SLOT_BYTES - 1
        length = int.from_bytes(self.exchange(len(own).to_bytes(8, "little"))[0], "little")
        return b"".join(self.exchange(own[at : at + most])[0] for at in range(0, length, most))

    def meet(self) -> None:
        """Wait until every rank is here: all of them, in the same order."""
        self.library.meet_now(self.handle)

    def make_room(self) -> None:
        """Rank 0: wait until there is room for another order, and so for its payload."""
        self.library.make_room(self.handle)

    def wait_for_told(self, orders: int) -> None:
        """Wait until so many orders were told, and take none. From any thread; others run meanwhile."""
        self.library.wait_for_told(self.handle, orders)

    def note(self, what: Note, value: int) -> None:
        """Say something of this rank, for the others to look at. From any thread."""
        self.library.note(self.handle, what, value)

    def noted(self, what: Note) -> int:
        """Return the sum of what the others say. From any thread."""
        return int(self.library.noted(self.handle, what))

    def _rows(self, address: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        offset = address - self._memory.address
        flat = torch.frombuffer(self._memory.mapped, dtype=dtype, count=rows * width, offset=offset)
        return flat.view(rows, width)

    def tell_run(self, step: object, begin: int, end: int, length: int) -> None:
        """Have the others run operations ``[begin, end)`` over a step; length: its largest position plus 1."""
        order = self._order
        order.kind, order.begin, order.end, order.length = OrderKind.RUN, begin, end, length
        self.library.tell(self.handle, ctypes.byref(order), step)

    def tell_mail(self, kind: OrderKind, mail: bytes, item_bytes: int) -> None:
        """Have the others do what the mail says: items of one size, as many at a time as there is room for."""
        for part in self._parts(mail, item_bytes):
            self._tell_part(kind, part)

    def move_blocks(self, kind: OrderKind, pairs: bytes, move: Callable[[bytes], None]) -> None:
        """Rank 0: have all ranks move blocks, this one by ``move``; see `wait_for_moved`."""
        for part in self._parts(pairs, PAIR_BYTES):
            self._tell_part(kind, part)
            try:
                move(part)
            finally:  # the others meet in any case: who does not would be one meeting behind them from then on
                self.wait_for_moved()

    def wait_for_moved(self) -> None:
        """Wait until all ranks have moved blocks, where some keep KV together: one may write what another was to copy."""
        if not self.share.turn.is_alone:
            self.meet()

    def _parts(self, mail: bytes, item_bytes: int) -> Iterator[bytes]:
        most = self.library.mail_ints * 4 // item_bytes * item_bytes
        assert most, item_bytes
        return (mail[begin : begin + most] for begin in range(0, len(mail), most))

    def _tell_part(self, kind: OrderKind, part: bytes) -> None:
        self.make_room()  # its place may still be read
        ctypes.memmove(self.library.mail(self.handle), part, len(part))
        self._tell(kind, len(part))

    def tell_done(self, outputs: int) -> None:
        """Say that a step is done: what it gave is the payload, so many rows of logits."""
        self._order.num_outputs = outputs
        self._tell(OrderKind.RUN, 0)

    def tell_chore(self) -> None:
        """Have the others do a chore."""
        self._tell(OrderKind.CHORE, 0)

    def _tell(self, kind: OrderKind, end: int) -> None:
        order = self._order
        order.kind, order.begin, order.end, order.length = kind, 0, end, 0
        self.library.tell(self.handle, ctypes.byref(order), None)

    def wait_for_all(self) -> None:
        """Wait until the others have done what they were told; the first time, until they are there."""
        self.library.wait_for_all(self.handle)

    def hear(self, step: object) -> COrder:
        """Wait for the next order; a run's step is described in ``step``, a `CStep` of whoever hears of none."""
        self.library.hear(self.handle, ctypes.byref(self._order), step)
        return self._order

    def mail(self, order: COrder) -> bytes:
        """Return what came with the order."""
        return ctypes.string_at(self.library.mail(self.handle), order.end)

    def done_with(self, orders: int) -> None:
        """Say that so many orders were carried out."""
        self.library.done_with(self.handle, orders)

    def wait_for_done(self, orders: int) -> None:
        """Rank 0: wait until all others have said that of so many. From any thread; others run meanwhile."""
        self.library.wait_for_done(self.handle, orders)

    def done(self) -> None:
        """Say that the order was carried out, or, the first time, that this rank is there."""
        self.library.done(self.handle)


def vector_records(width: int, dtype: torch.dtype) -> np.dtype[np.void]:
    """Return what mail of `OrderKind.EMBEDS` is made of: which of the step's tokens, and its vector's bytes."""
    return np.dtype([("token", np.int32), ("vector", np.uint8, (width * dtype.itemsize,))])


def input_place(max_tokens: int, width: int, dtype: torch.dtype, ranks: Ranks | None) -> torch.Tensor:
    """Return where a stage reads what the stage before has computed, ``[max_tokens, width]``: all its ranks read it there."""
    if ranks is not None:
        return ranks.payload(width, dtype)
    return lazy_zeros((max_tokens, width), dtype, torch.device("cpu"))
