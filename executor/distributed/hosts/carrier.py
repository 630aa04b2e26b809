"""Transfer of orders and collectives between this host and others: sends local messages, dispatches received ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quintet.executor.distributed.hosts.host_collectives import HostCollectives
from quintet.executor.distributed.hosts.link import LinkEnd, LinkReceiver, LinkSender
from quintet.executor.distributed.hosts.messages import (
    PIECE_BYTES,
    Carried,
    CollectiveRows,
    CollectivesDone,
    LinkNote,
    LinkOrder,
    LinkProgress,
    OfLink,
    PayloadChunk,
    Senseless,
    most_bytes,
)
from quintet.executor.distributed.hosts.topology import (
    hearer_of,
    links_between,
    meets_over_hosts,
    ranks_of,
    teller_of,
)
from quintet.executor.distributed.parallel.library import CRanksShape, open_ranks_library
from quintet.executor.distributed.parallel.shapes import link_shape, shape_of
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
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ears: dict[int, tuple[LinkReceiver, int]] = {}
        self._mouths: dict[int, tuple[LinkSender, int]] = {}
        """Each end with the host number of the other end."""
        self._noted: dict[int, tuple[int, int]] = {}
        self._meetings: HostCollectives | None = None
        within = meets_over_hosts(executor)
        if within:
            shape = shape_of(config)
            self._meetings = HostCollectives(library, descriptors[0], shape, executor, host, self._ring)
        for link in links_between(executor):
            shape = _shape_of(config, link)
            is_last = not within and link == executor.pipeline_parallel_size - 1
            teller, hearer = teller_of(executor, link), hearer_of(executor, link)
            there = ranks_of(executor, hearer) if within else range(1, 2)
            others = [rank for rank in range(1, shape.ranks) if rank not in there]
            memory = descriptors[0 if within else link]
            if host == teller:
                end = LinkEnd(library, memory, shape, link, there, is_last=is_last, is_within=within)
                self._ears[link] = LinkReceiver(end, self._ring), hearer
            elif host == hearer:
                end = LinkEnd(library, memory, shape, link, [0, *others], is_last=is_last, is_within=within)
                self._mouths[link] = LinkSender(end, self._ring), teller

    def fileno(self) -> int:
        """Return a descriptor that is readable while messages wait to be sent."""
        return self._bell

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def send_all(self) -> None:
        """Send all waiting messages."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        if self._meetings is not None:
            for host, frames in self._meetings.newly_met():
                self._send(host, frames)
        for link, (mouth, host) in self._mouths.items():
            orders = mouth.newly_done()
            if orders is not None:
                self._send(host, [encode(LinkProgress(link, orders))])
        for ear, host in self._ears.values():
            heard = ear.take()
            if heard is not None:
                told, content, payload = heard
                while len(payload) > PIECE_BYTES:
                    self._send(host, [encode(PayloadChunk(told.link)), payload[:PIECE_BYTES]])
                    payload = payload[PIECE_BYTES:]
                self._send(host, [encode(told), content, payload])

    def send_notes(self) -> None:
        """Send changed progress notes of the local receivers."""
        for link, (mouth, host) in self._mouths.items():
            notes = mouth.notes()
            if notes != self._noted.get(link):
                self._noted[link] = notes
                self._send(host, [encode(LinkNote(link, *notes))])

    def take(self, message: Carried, frames: Sequence[Any]) -> None:
        """Dispatch a message of another host. Raises `Senseless` for an invalid one."""
        if isinstance(message, OfLink):
            self._take_of_link(message, frames)
        elif self._meetings is None:
            raise Senseless("sent a collective, but there are no ranks on several hosts")
        elif isinstance(message, CollectiveRows):
            self._meetings.take_rows(message, memoryview(frames[1].buffer))
        elif isinstance(message, CollectivesDone):
            self._meetings.take_met(message)

    def _take_of_link(self, message: OfLink, frames: Sequence[Any]) -> None:
        ends: Mapping[int, tuple[LinkReceiver | LinkSender, int]] = (
            self._mouths if isinstance(message, PayloadChunk | LinkOrder) else self._ears
        )
        if message.link not in ends:
            raise Senseless(f"sent a message of unknown link {message.link}")
        match message, ends[message.link][0]:
            case PayloadChunk(), LinkSender() as end:
                end.take_piece(memoryview(frames[1].buffer))
            case LinkOrder(), LinkSender() as end:
                end.tell(message, *(memoryview(frame.buffer) for frame in frames[1:]))
            case LinkProgress(), LinkReceiver() as end:
                end.done(message.orders)
            case LinkNote(), LinkReceiver() as end:
                end.note(message.progress, message.chores)


def largest_frame(config: EngineConfig) -> int:
    """Return the maximum frame size between hosts in bytes."""
    library = open_ranks_library()
    links = links_between(config.executor)
    return max(most_bytes(_shape_of(config, link), library) for link in links)


def _shape_of(config: EngineConfig, link: int) -> CRanksShape:
    return shape_of(config) if meets_over_hosts(config.executor) else link_shape(config, link)


def read_head(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> Any:
    """Decode a message's head and check the number of frames. Raises `Senseless`."""
    try:
        message = decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, IndexError):
        raise Senseless("sent an invalid message") from None
    if len(frames) != NUM_FRAMES.get(type(message), 1):
        raise Senseless("sent an invalid message")
    return message
