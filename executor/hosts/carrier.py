"""One host's ends of all links to other hosts: what they have to say goes out, what comes is given to the right one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quintet.executor.hosts.ends import Ear, LinkEnd, Mouth
from quintet.executor.hosts.places import hearer_of, links_between, teller_of
from quintet.executor.hosts.talk import PIECE_BYTES, Carried, Done, Noted, Piece, Senseless, Told, most_bytes
from quintet.executor.parallel.library import open_ranks_library
from quintet.executor.parallel.shapes import link_shape
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig

Frames = list[Any]
"""Of a message: its head, and what belongs to it. Bytes, or memory that stays as it is until the order is done with."""
Send = Callable[[int, Frames], None]
NUM_FRAMES: Mapping[type, int] = {Told: 3, Piece: 2}
"""Of messages that are more than a head."""


class Carrier:
    """Used in one thread, that of the sockets."""

    def __init__(self, config: EngineConfig, host: int, descriptors: Sequence[int], send: Send) -> None:
        """descriptors: of the links' memory. send: takes the number of the host that something is for."""
        executor, library = config.executor, open_ranks_library()
        self._send = send
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ears: dict[int, tuple[Ear, int]] = {}
        self._mouths: dict[int, tuple[Mouth, int]] = {}
        """With the host at the other end."""
        self._noted: dict[int, tuple[int, int]] = {}
        for link in links_between(executor):
            shape, is_last = link_shape(config, link), link == executor.pipeline_parallel_size - 1
            teller, hearer = teller_of(executor, link), hearer_of(executor, link)
            if host == teller:
                end = LinkEnd(library, descriptors[link], shape, link, 1, is_last=is_last)
                self._ears[link] = Ear(end, self._ring), hearer
            elif host == hearer:
                end = LinkEnd(library, descriptors[link], shape, link, 0, is_last=is_last)
                self._mouths[link] = Mouth(end, self._ring), teller

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
        for link, (mouth, host) in self._mouths.items():
            orders = mouth.newly_done()
            if orders is not None:
                self._send(host, [encode(Done(link, orders))])
        for ear, host in self._ears.values():
            heard = ear.take()
            if heard is not None:
                told, content, payload = heard
                while len(payload) > PIECE_BYTES:
                    self._send(host, [encode(Piece(told.link)), payload[:PIECE_BYTES]])
                    payload = payload[PIECE_BYTES:]
                self._send(host, [encode(told), content, payload])

    def send_notes(self) -> None:
        """Send what those who hear here say of themselves, if it is news."""
        for link, (mouth, host) in self._mouths.items():
            notes = mouth.notes()
            if notes != self._noted.get(link):
                self._noted[link] = notes
                self._send(host, [encode(Noted(link, *notes))])

    def take(self, message: Carried, frames: Sequence[Any]) -> None:
        """Take what the host at the other end of a link says. Raises `Senseless` where it makes no sense."""
        ends: Mapping[int, tuple[Ear | Mouth, int]] = (
            self._mouths if isinstance(message, Piece | Told) else self._ears
        )
        if message.link not in ends:
            raise Senseless(f"speaks of link {message.link}")
        match message, ends[message.link][0]:
            case Piece(), Mouth() as end:
                end.take_piece(memoryview(frames[1].buffer))
            case Told(), Mouth() as end:
                end.tell(message, *(memoryview(frame.buffer) for frame in frames[1:]))
            case Done(), Ear() as end:
                end.done(message.orders)
            case Noted(), Ear() as end:
                end.note(message.progress, message.chores)


def largest_frame(config: EngineConfig) -> int:
    """Return the bytes of the largest frame that hosts send each other."""
    library = open_ranks_library()
    links = links_between(config.executor)
    return max(most_bytes(link_shape(config, link), library) for link in links)


def read_head(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> Any:
    """Return a message of which these are the frames. Raises `Senseless` where they make none."""
    try:
        message = decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, IndexError):
        raise Senseless("says what makes no sense") from None
    if len(frames) != NUM_FRAMES.get(type(message), 1):
        raise Senseless("says what makes no sense")
    return message
