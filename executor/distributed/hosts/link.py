"""The two ends of a link between two hosts: memory that looks to a stage, or a rank, as if the other one were beside it.

    host A   stage k ── tells ──▶ memory ──▶ LinkReceiver ── order ──▶          LinkSender ──▶ memory ── hears ──▶
    stage k + 1   host B
                                             LinkReceiver ◀────────── done ──── LinkSender

The ear says that an order was carried out when the stage that heard it on the other host has said so. So as many orders are
under way as between stages of one host, there is room for whatever comes, and a place in memory is written again only when it has
been read on both. Waiting is done by a thread of each end, everything else by the loop that has the sockets.

Ranks on another host than rank 0 are told by such ends as well: one stands here for all of them, the other there for rank 0, and
for those that are not there, who are never waited for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count

from quintet.executor.distributed.hosts.messages import LinkOrder, Senseless
from quintet.executor.distributed.parallel.library import (
    PAIR_BYTES,
    COrder,
    CRanksShape,
    Note,
    OrderKind,
    RanksLibrary,
    RanksMemory,
    StepPart,
)

_FIELDS = tuple(name for name, _ in COrder._fields_)
_OF_PAIRS = (OrderKind.COPY_BLOCKS, OrderKind.SWAP_OUT, OrderKind.SWAP_IN)
_WITH_MAIL = (*_OF_PAIRS, OrderKind.EMBEDS)


class LinkEnd:
    """A view of a link's memory, as one of its two ranks; or of what ranks on several hosts share, as those that are not here."""

    def __init__(
        self,
        library: RanksLibrary,
        descriptor: int,
        shape: CRanksShape,
        link: int,
        ranks: Sequence[int],
        *,
        is_last: bool,
        is_within: bool = False,
    ) -> None:
        """ranks: whom it stands for. The first of them hears, or tells."""
        self.link = link
        self.library, self.shape = library, shape
        self.memory = RanksMemory(library, descriptor, shape)
        self.handle, *self._beside = (
            library.new(ctypes.byref(shape), self.memory.address, rank, 0) for rank in ranks
        )
        self.is_within = is_within
        """Whether the ranks of one stage are told by it, not the next stage."""
        self.is_last = is_last
        """Whether the link carries logits, to the first stage."""

    def all_done(self, orders: int) -> None:
        """Say that all whom it stands for have carried out so many."""
        self.library.done_with(self.handle, orders)
        self.others_done(orders)

    def others_done(self, orders: int) -> None:
        """Say that all but the first of them have: to a teller nobody but those here counts."""
        for each in self._beside:
            self.library.done_with(each, orders)

    def payload_bytes(self, order: COrder) -> int:
        """Return how much of the payload an order comes with."""
        if order.kind != OrderKind.RUN:
            return 0
        shape, is_new = self.shape, order.begin == StepPart.LAYERS
        rows, most = (
            (order.num_outputs, shape.max_outputs) if self.is_last else (order.num_tokens, shape.max_tokens)
        )
        return int(rows * (shape.payload_bytes // most)) if self.is_last or is_new else 0

    def at(self, address: int, size: int) -> memoryview:
        """Return so many bytes of the memory."""
        begin = address - self.memory.address
        return memoryview(self.memory.mapped)[begin : begin + size]


class LinkReceiver:
    """Hears what a stage of this host tells one on another."""

    def __init__(self, end: LinkEnd, ring: Callable[[], None]) -> None:
        """ring: called from another thread when there is something to take."""
        self._end, self._ring = end, ring
        self._order = COrder()
        self._heard, self._taken = threading.Event(), threading.Semaphore(0)
        self._num_heard = 0
        self._least_done = 0
        """What may be said to be done next: of no order, that who carries them out is there."""
        threading.Thread(target=self._hear, name=f"link {end.link}", daemon=True).start()

    def _hear(self) -> None:
        library, step = self._end.library, ctypes.create_string_buffer(self._end.library.step_bytes)
        while True:
            library.hear(self._end.handle, ctypes.byref(self._order), step)
            self._heard.set()
            self._ring()
            self._taken.acquire()

    def take(self) -> tuple[LinkOrder, bytes, memoryview] | None:
        """Return the order that was heard, what comes with it, and its payload, which stays where it is until it is done with."""
        if not self._heard.is_set():
            return None
        self._heard.clear()
        end, order = self._end, self._order
        library, handle = end.library, end.handle
        content = b""
        if order.kind in _WITH_MAIL:
            content = ctypes.string_at(library.mail(handle), order.end)
        elif order.kind == OrderKind.RUN and not end.is_last:
            size = library.pack_step(handle, ctypes.byref(order), None)
            packed = ctypes.create_string_buffer(size)
            library.pack_step(handle, ctypes.byref(order), packed)
            content = packed.raw
        payload = end.at(library.payload(handle), end.payload_bytes(order))
        told = LinkOrder(end.link, tuple(getattr(order, name) for name in _FIELDS))
        self._num_heard += 1
        self._taken.release()
        return told, content, payload

    def done(self, orders: int) -> None:
        """Say to the stage here that so many orders were carried out there."""
        if not self._least_done <= orders <= self._num_heard:
            raise Senseless(
                f"says that {orders} orders of link {self._end.link} are done, of {self._num_heard}"
            )
        self._least_done = orders + 1
        self._end.all_done(orders)

    def note(self, progress: int, chores: int) -> None:
        """Say to the stage here what those there say of themselves."""
        self._end.library.note(self._end.handle, Note.PROGRESS, progress)
        self._end.library.note(self._end.handle, Note.CHORES, chores)


class LinkSender:
    """Tells a stage of this host what one on another has told."""

    def __init__(self, end: LinkEnd, ring: Callable[[], None]) -> None:
        """ring: called from another thread when an order was carried out."""
        self._end, self._ring = end, ring
        self._num_told = 0
        self._num_bytes = 0
        """Of the next order's payload that are there."""
        self._num_done: int | None = None
        """Written by the thread that waits; None: nobody is there yet."""
        self._num_said: int | None = None
        end.others_done(0)
        threading.Thread(target=self._wait, name=f"link {end.link}", daemon=True).start()

    def _wait(self) -> None:
        for num_done in count():
            self._end.library.wait_for_done(self._end.handle, num_done)
            self._num_done = num_done
            self._ring()

    def take_piece(self, piece: memoryview) -> None:
        """Keep bytes of the next order's payload. Raises `Senseless` where there is no room for them."""
        self._check_room()
        end = self._end
        if not 0 < len(piece) <= end.shape.payload_bytes - self._num_bytes:
            raise Senseless(f"tells more bytes on link {end.link} than there is room for")
        self._put(piece)
        self._num_bytes += len(piece)

    def _put(self, piece: memoryview) -> None:
        end = self._end
        end.at(end.library.payload(end.handle) + self._num_bytes, len(piece))[:] = piece

    def _check_room(self) -> None:
        most_told = (
            self._end.shape.depth - 1 if self._num_said is None else self._num_said + self._end.shape.depth
        )
        if self._num_told >= most_told:
            raise Senseless(f"tells more on link {self._end.link} than there is room for")

    def tell(self, told: LinkOrder, content: memoryview, payload: memoryview) -> None:
        """Tell an order of which this is all of the payload, or what came behind its pieces. Raises `Senseless`."""
        end, order = self._end, COrder(*told.order)
        library, handle = end.library, end.handle
        self._check_room()
        self._check(order, len(content))
        is_step = order.kind == OrderKind.RUN and not end.is_last
        if is_step and not library.unpack_step(handle, ctypes.byref(order), bytes(content), len(content)):
            raise Senseless(f"tells a step on link {end.link} that cannot be")
        size = self._num_bytes + len(payload)
        if size != end.payload_bytes(order):
            raise Senseless(f"tells {size} bytes on link {end.link}, not {end.payload_bytes(order)}")
        self._put(payload)
        self._num_bytes = 0
        if order.kind in _WITH_MAIL:
            end.at(library.mail(handle), len(content))[:] = content
        library.tell(handle, ctypes.byref(order), None)
        self._num_told += 1
        end.others_done(self._num_told)

    def _check(self, order: COrder, size: int) -> None:
        if order.kind in _OF_PAIRS or (order.kind == OrderKind.EMBEDS and self._end.is_within):
            item_bytes = PAIR_BYTES if order.kind in _OF_PAIRS else 1
            is_right = order.end == size <= 4 * self._end.library.mail_ints and size % item_bytes == 0
        elif order.kind == OrderKind.CHORE or (order.kind == OrderKind.RUN and self._end.is_last):
            is_right = size == 0 and 0 <= order.num_outputs <= self._end.shape.max_outputs
        elif self._end.is_within:
            is_right = order.kind == OrderKind.RUN and 0 <= order.begin <= order.end
        else:
            is_right = (
                order.kind == OrderKind.RUN and StepPart.LAYERS <= order.begin < order.end <= StepPart.END
            )
        if not is_right:
            raise Senseless(f"tells an order on link {self._end.link} that cannot be")

    def newly_done(self) -> int | None:
        """Return how many orders were carried out, if that is news."""
        if self._num_done == self._num_said:
            return None
        self._num_said = self._num_done
        return self._num_said

    def notes(self) -> tuple[int, int]:
        """Return the progress of who hears, and whether there are chores."""
        end = self._end
        return end.library.noted(end.handle, Note.PROGRESS), end.library.noted(end.handle, Note.CHORES)
