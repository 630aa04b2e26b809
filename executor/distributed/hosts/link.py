"""The two ends of a link between two hosts: each emulates the remote rank in the local memory of the link.

    host A                                                          host B
    stage k ── order ──▶ memory ──▶ LinkReceiver ── LinkOrder ────▶ LinkSender ──▶ memory ── order ──▶ stage k + 1
            ◀── done ─── memory ◀── LinkReceiver ◀─ LinkProgress ── LinkSender ◀── memory ◀── done ───

The receiver marks an order as done when the remote stage has finished it. So the limit on orders in flight is that of
a local link. There is always space for a message, and memory is reused only after both hosts have read it. Each
end has a waiting thread; the socket loop does the rest.

Ranks of one stage on several hosts use the same ends. On the leader's host, an end acts for the followers of one
other host. On that host, an end acts for the leader and for all ranks of further hosts, which are never waited for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count

from quintet.executor.distributed.hosts.messages import InvalidMessage, LinkOrder
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
_WITH_ITEMS = (*_OF_PAIRS, OrderKind.EMBEDS)


class LinkEnd:
    """A view of a link's memory in the role of its remote ranks."""

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
        observed_bytes: int = 0,
    ) -> None:
        """ranks: the emulated ranks; the first of them sends or receives. observed_bytes: per token, after the logits."""
        self.link = link
        self.library, self.shape = library, shape
        self.memory = RanksMemory(library, descriptor, shape)
        self.handle, *self._other_handles = (
            library.new(ctypes.byref(shape), self.memory.address, rank, 0) for rank in ranks
        )
        self.is_within = is_within
        """True if the link connects ranks of one stage, instead of two stages."""
        self.is_last = is_last
        """True if the link carries logits, to the first stage."""
        self._observed_bytes = observed_bytes

    def all_done(self, orders: int) -> None:
        """Mark ``orders`` orders as done for all emulated ranks."""
        self.library.done_with(self.handle, orders)
        self.others_done(orders)

    def others_done(self, orders: int) -> None:
        """Mark orders as done for all emulated ranks but the first; a sender counts local ranks only."""
        for each in self._other_handles:
            self.library.done_with(each, orders)

    def payload_bytes(self, order: COrder) -> int:
        """Return the payload size of an order in bytes."""
        if order.kind != OrderKind.RUN:
            return 0
        shape = self.shape
        if self.is_last:
            logits_bytes = (
                shape.payload_bytes - shape.max_tokens * self._observed_bytes
            ) // shape.max_outputs
            return int(order.num_outputs * logits_bytes + order.num_tokens * self._observed_bytes)
        is_new = order.begin == StepPart.LAYERS
        return int(order.num_tokens * (shape.payload_bytes // shape.max_tokens)) if is_new else 0

    def at(self, address: int, size: int) -> memoryview:
        """Return a view of ``size`` bytes of the memory."""
        begin = address - self.memory.address
        return memoryview(self.memory.mapped)[begin : begin + size]


class LinkReceiver:
    """Receives the orders that a local stage sends to a remote one."""

    def __init__(self, end: LinkEnd, ring: Callable[[], None]) -> None:
        """ring: called by the thread when an order is available."""
        self._end, self._ring = end, ring
        self._order = COrder()
        self._has_order, self._taken = threading.Event(), threading.Semaphore(0)
        self._num_received = 0
        self._least_done = 0
        """Minimum value of the next `done`: 0 means that the remote end is ready."""
        threading.Thread(target=self._receive_orders, name=f"link {end.link}", daemon=True).start()

    def _receive_orders(self) -> None:
        library, step = self._end.library, ctypes.create_string_buffer(self._end.library.step_bytes)
        while True:
            library.receive(self._end.handle, ctypes.byref(self._order), step)
            self._has_order.set()
            self._ring()
            self._taken.acquire()

    def take(self) -> tuple[LinkOrder, bytes, memoryview] | None:
        """Return the received order, its content and its payload; the payload is valid until the order is done."""
        if not self._has_order.is_set():
            return None
        self._has_order.clear()
        end, order = self._end, self._order
        library, handle = end.library, end.handle
        content = b""
        if order.kind in _WITH_ITEMS:
            content = ctypes.string_at(library.items(handle), order.end)
        elif order.kind == OrderKind.RUN and not end.is_last:
            size = library.pack_step(handle, ctypes.byref(order), None)
            packed = ctypes.create_string_buffer(size)
            library.pack_step(handle, ctypes.byref(order), packed)
            content = packed.raw
        payload = end.at(library.payload(handle), end.payload_bytes(order))
        message = LinkOrder(end.link, tuple(getattr(order, name) for name in _FIELDS))
        self._num_received += 1
        self._taken.release()
        return message, content, payload

    def done(self, orders: int) -> None:
        """Mark orders as done by the remote stage. Raises `InvalidMessage`."""
        if not self._least_done <= orders <= self._num_received:
            raise InvalidMessage(
                f"reports {orders} finished orders of link {self._end.link}, of {self._num_received} sent"
            )
        self._least_done = orders + 1
        self._end.all_done(orders)

    def note(self, progress: int, idle_tasks: int) -> None:
        """Store the remote ranks' notes for the local stage."""
        self._end.library.note(self._end.handle, Note.PROGRESS, progress)
        self._end.library.note(self._end.handle, Note.IDLE_TASKS, idle_tasks)


class LinkSender:
    """Sends a remote stage's orders to the local one."""

    def __init__(self, end: LinkEnd, ring: Callable[[], None]) -> None:
        """ring: called by the thread when an order is done."""
        self._end, self._ring = end, ring
        self._num_sent = 0
        self._num_bytes = 0
        """Received bytes of the next order's payload."""
        self._num_done: int | None = None
        """Finished orders, written by the thread; None before the local rank is ready."""
        self._num_reported: int | None = None
        end.others_done(0)
        threading.Thread(target=self._wait, name=f"link {end.link}", daemon=True).start()

    def _wait(self) -> None:
        for num_done in count():
            self._end.library.wait_for_done(self._end.handle, num_done)
            self._num_done = num_done
            self._ring()

    def take_chunk(self, chunk: memoryview) -> None:
        """Store a chunk of the next order's payload. Raises `InvalidMessage` if it does not fit."""
        self._check_depth()
        end = self._end
        if not 0 < len(chunk) <= end.shape.payload_bytes - self._num_bytes:
            raise InvalidMessage(f"sent more payload on link {end.link} than an order can have")
        self._put(chunk)
        self._num_bytes += len(chunk)

    def _put(self, chunk: memoryview) -> None:
        end = self._end
        end.at(end.library.payload(end.handle) + self._num_bytes, len(chunk))[:] = chunk

    def _check_depth(self) -> None:
        num_reported = -1 if self._num_reported is None else self._num_reported
        if self._num_sent >= num_reported + self._end.shape.depth:
            raise InvalidMessage(f"sent more orders on link {self._end.link} than its depth")

    def send_order(self, message: LinkOrder, content: memoryview, payload: memoryview) -> None:
        """Send an order with its payload, or with the last chunk of it. Raises `InvalidMessage`."""
        end, order = self._end, COrder(*message.order)
        library, handle = end.library, end.handle
        self._check_depth()
        self._check(order, len(content))
        is_step = order.kind == OrderKind.RUN and not end.is_last
        if is_step and not library.unpack_step(handle, ctypes.byref(order), bytes(content), len(content)):
            raise InvalidMessage(f"sent an invalid step on link {end.link}")
        size = self._num_bytes + len(payload)
        if size != end.payload_bytes(order):
            raise InvalidMessage(
                f"sent {size} bytes of payload on link {end.link}, not {end.payload_bytes(order)}"
            )
        self._put(payload)
        self._num_bytes = 0
        if order.kind in _WITH_ITEMS:
            end.at(library.items(handle), len(content))[:] = content
        library.send(handle, ctypes.byref(order), None)
        self._num_sent += 1
        end.others_done(self._num_sent)

    def _check(self, order: COrder, size: int) -> None:
        if order.kind in _OF_PAIRS or (order.kind == OrderKind.EMBEDS and self._end.is_within):
            item_bytes = PAIR_BYTES if order.kind in _OF_PAIRS else 1
            is_right = order.end == size <= 4 * self._end.library.item_ints and size % item_bytes == 0
        elif order.kind == OrderKind.IDLE_TASK or (order.kind == OrderKind.RUN and self._end.is_last):
            is_right = size == 0 and 0 <= order.num_outputs <= self._end.shape.max_outputs
            is_right &= 0 <= order.num_tokens <= self._end.shape.max_tokens
        elif self._end.is_within:
            is_right = order.kind == OrderKind.RUN and 0 <= order.begin <= order.end
        else:
            is_right = (
                order.kind == OrderKind.RUN and StepPart.LAYERS <= order.begin < order.end <= StepPart.END
            )
        if not is_right:
            raise InvalidMessage(f"sent an invalid order on link {self._end.link}")

    def newly_done(self) -> int | None:
        """Return the number of finished orders if it has changed, else None."""
        if self._num_done == self._num_reported:
            return None
        self._num_reported = self._num_done
        return self._num_reported

    def notes(self) -> tuple[int, int]:
        """Return the local receiver's progress and number of idle tasks."""
        end = self._end
        return end.library.noted(end.handle, Note.PROGRESS), end.library.noted(end.handle, Note.IDLE_TASKS)
