"""One host's ends of all links to other hosts: what they have to say goes out, what comes is given to the right one."""

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
"""Of a message: its head, and what belongs to it. Bytes, or memory that stays as it is until the order is done with."""
Send = Callable[[int, Frames], None]
NUM_FRAMES: Mapping[type, int] = {LinkOrder: 3, PayloadChunk: 2, CollectiveRows: 2}
"""Of messages that are more than a head."""


class Carrier:
    """Used in one thread, that of the sockets."""

    def __init__(self, config: EngineConfig, host: int, descriptors: Sequence[int], send: Send) -> None:
        """descriptors: of the links' memory, or of that of ranks on several hosts. send: takes the number of the host that
        something is for.
        """
        executor, library = config.executor, open_ranks_library()
        self._send = send
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ears: dict[int, tuple[LinkReceiver, int]] = {}
        self._mouths: dict[int, tuple[LinkSender, int]] = {}
        """With the host at the other end."""
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
        """Return the descriptor that is readable while there is something to send."""
        return self._bell

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def send_all(self) -> None:
        """Send what there is to send."""
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
        """Send what those who hear here say of themselves, if it is news."""
        for link, (mouth, host) in self._mouths.items():
            notes = mouth.notes()
            if notes != self._noted.get(link):
                self._noted[link] = notes
                self._send(host, [encode(LinkNote(link, *notes))])

    def take(self, message: Carried, frames: Sequence[Any]) -> None:
        """Take what another host says. Raises `Senseless` where it makes no sense."""
        if isinstance(message, OfLink):
            self._take_of_link(message, frames)
        elif self._meetings is None:
            raise Senseless("speaks of meetings, and there are none")
        elif isinstance(message, CollectiveRows):
            self._meetings.take_rows(message, memoryview(frames[1].buffer))
        elif isinstance(message, CollectivesDone):
            self._meetings.take_met(message)

    def _take_of_link(self, message: OfLink, frames: Sequence[Any]) -> None:
        ends: Mapping[int, tuple[LinkReceiver | LinkSender, int]] = (
            self._mouths if isinstance(message, PayloadChunk | LinkOrder) else self._ears
        )
        if message.link not in ends:
            raise Senseless(f"speaks of link {message.link}")
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
    """Return the bytes of the largest frame that hosts send each other."""
    library = open_ranks_library()
    links = links_between(config.executor)
    return max(most_bytes(_shape_of(config, link), library) for link in links)


def _shape_of(config: EngineConfig, link: int) -> CRanksShape:
    return shape_of(config) if meets_over_hosts(config.executor) else link_shape(config, link)


def read_head(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> Any:
    """Return a message of which these are the frames. Raises `Senseless` where they make none."""
    try:
        message = decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, IndexError):
        raise Senseless("says what makes no sense") from None
    if len(frames) != NUM_FRAMES.get(type(message), 1):
        raise Senseless("says what makes no sense")
    return message
