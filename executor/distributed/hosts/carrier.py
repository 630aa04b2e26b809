"""Transfer of orders and collectives between this host and others: sends local messages, dispatches received ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quintet.executor.distributed.hosts.host_collectives import HostCollectives
from quintet.executor.distributed.hosts.link import LinkEnd, LinkReceiver, LinkSender
from quintet.executor.distributed.hosts.messages import (
    CHUNK_BYTES,
    Carried,
    CollectiveRows,
    CollectivesDone,
    InvalidMessage,
    LinkMessage,
    LinkNote,
    LinkOrder,
    LinkProgress,
    PayloadChunk,
    most_bytes,
)
from quintet.executor.distributed.hosts.topology import (
    links_between,
    ranks_of,
    receiver_host,
    sender_host,
    spans_hosts,
)
from quintet.executor.distributed.parallel.library import CRanksShape, open_ranks_library
from quintet.executor.distributed.parallel.shapes import link_shape, observed_row_bytes, shape_of
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig

Frames = list[Any]
"""A message's head and payload frames: bytes, or memory that stays unchanged until the order is done."""
Send = Callable[[int, Frames], None]
NUM_FRAMES: Mapping[type, int] = {LinkOrder: 3, PayloadChunk: 2, CollectiveRows: 2}
"""Number of frames of messages with a payload."""


class Carrier:
    """A host's ends of all links. Used by the socket thread only."""

    def __init__(self, config: EngineConfig, host: int, descriptors: Sequence[int], send: Send) -> None:
        """descriptors: memory of the links, or of ranks on several hosts. send: sends frames to a host number."""
        executor, library = config.executor, open_ranks_library()
        self._send = send
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._receivers: dict[int, tuple[LinkReceiver, int]] = {}
        self._senders: dict[int, tuple[LinkSender, int]] = {}
        """Each end with the host number of the other end."""
        self._noted: dict[int, tuple[int, int]] = {}
        self._collectives: HostCollectives | None = None
        is_within = spans_hosts(executor)
        if is_within:
            shape = shape_of(config)
            self._collectives = HostCollectives(library, descriptors[0], shape, executor, host, self._ring)
        observed_bytes = observed_row_bytes(config)
        for link in links_between(executor):
            shape = _shape_of(config, link)
            is_last = not is_within and link == executor.pipeline_parallel_size - 1
            sending_host, receiving_host = sender_host(executor, link), receiver_host(executor, link)
            if host not in (sending_host, receiving_host):
                continue
            ranks: Sequence[int] = ranks_of(executor, receiving_host) if is_within else range(1, 2)
            if host == receiving_host:  # acts for the leader and for the ranks of further hosts
                ranks = [0, *(rank for rank in range(1, shape.ranks) if rank not in ranks)]
            end = LinkEnd(
                *(library, descriptors[0 if is_within else link], shape, link, ranks),
                is_last=is_last,
                is_within=is_within,
                observed_bytes=observed_bytes,
            )
            if host == sending_host:
                self._receivers[link] = LinkReceiver(end, self._ring), receiving_host
            else:
                self._senders[link] = LinkSender(end, self._ring), sending_host

    def fileno(self) -> int:
        """Return a descriptor that is readable while messages wait to be sent."""
        return self._wakeup_fd

    def _ring(self) -> None:
        os.eventfd_write(self._wakeup_fd, 1)

    def send_all(self) -> None:
        """Send all waiting messages."""
        try:
            os.eventfd_read(self._wakeup_fd)
        except BlockingIOError:
            return
        if self._collectives is not None:
            for host, frames in self._collectives.newly_completed():
                self._send(host, frames)
        for link, (sender, host) in self._senders.items():
            orders = sender.newly_done()
            if orders is not None:
                self._send(host, [encode(LinkProgress(link, orders))])
        for receiver, host in self._receivers.values():
            received = receiver.take()
            if received is not None:
                order, content, payload = received
                while len(payload) > CHUNK_BYTES:
                    self._send(host, [encode(PayloadChunk(order.link)), payload[:CHUNK_BYTES]])
                    payload = payload[CHUNK_BYTES:]
                self._send(host, [encode(order), content, payload])

    def send_notes(self) -> None:
        """Send changed progress notes of the local receivers."""
        for link, (sender, host) in self._senders.items():
            notes = sender.notes()
            if notes != self._noted.get(link):
                self._noted[link] = notes
                self._send(host, [encode(LinkNote(link, *notes))])

    def take(self, message: Carried, frames: Sequence[Any]) -> None:
        """Dispatch a message of another host. Raises `InvalidMessage` for an invalid one."""
        if isinstance(message, LinkMessage):
            self._take_link_message(message, frames)
        elif self._collectives is None:
            raise InvalidMessage("sent a collective, but there are no ranks on several hosts")
        elif isinstance(message, CollectiveRows):
            self._collectives.take_rows(message, memoryview(frames[1].buffer))
        elif isinstance(message, CollectivesDone):
            self._collectives.take_done(message)

    def _take_link_message(self, message: LinkMessage, frames: Sequence[Any]) -> None:
        ends: Mapping[int, tuple[LinkReceiver | LinkSender, int]] = (
            self._senders if isinstance(message, PayloadChunk | LinkOrder) else self._receivers
        )
        if message.link not in ends:
            raise InvalidMessage(f"sent a message of unknown link {message.link}")
        match message, ends[message.link][0]:
            case PayloadChunk(), LinkSender() as end:
                end.take_chunk(memoryview(frames[1].buffer))
            case LinkOrder(), LinkSender() as end:
                end.send_order(message, *(memoryview(frame.buffer) for frame in frames[1:]))
            case LinkProgress(), LinkReceiver() as end:
                end.done(message.orders)
            case LinkNote(), LinkReceiver() as end:
                end.note(message.progress, message.idle_tasks)


def largest_frame(config: EngineConfig) -> int:
    """Return the maximum frame size between hosts in bytes."""
    library = open_ranks_library()
    links = links_between(config.executor)
    return max(most_bytes(_shape_of(config, link), library) for link in links)


def _shape_of(config: EngineConfig, link: int) -> CRanksShape:
    return shape_of(config) if spans_hosts(config.executor) else link_shape(config, link)


def read_head(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> Any:
    """Decode a message's head and check the number of frames. Raises `InvalidMessage`."""
    try:
        message = decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, IndexError):
        raise InvalidMessage("sent an invalid message") from None
    if len(frames) != NUM_FRAMES.get(type(message), 1):
        raise InvalidMessage("sent an invalid message")
    return message
