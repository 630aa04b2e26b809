"""What the first host and the others tell each other, over one connection each.

    member                                  hub, at the first host
      Join ──────────────────────────────────▶ same protocol, same sources, a place that is free
      ◀──────────────────────────── Welcome    the configuration
      Parts ─────────────────────────────────▶ same weights, same kernels
      ◀────────────────────────────── Begin    ranks are started; from here on LinkOrder, LinkProgress, LinkNote,
      HostHeartbeat pass both ways

Ranks of one stage that are on several hosts say `CollectiveRows` and `CollectivesDone` besides, each with the host it is for.

`LinkOrder` is followed by two frames: the step's arrays (``csrc/cpu/step_bytes.cpp``) or the order's mail, and its
payload. Of a long payload all but the last bytes come before it, as `PayloadChunk`s of one frame each: what arrives
says that somebody is there, however slow the network is.
"""

from __future__ import annotations

import msgspec
import zmq

from quintet.executor.distributed.parallel.child import ExpectedEnd
from quintet.executor.distributed.parallel.library import CRanksShape, RanksLibrary
from quintet.executor.model_config.fitting import MOST_RANKS

VERSION = 2
GROUP_KEY = ("--group-key", b"quintet hosts")
"""The flag that names the key file, and what keys are made of it for."""
RUNNER = "hosts"
"""Instead of the one that identities name whose KV memory is stored: hosts have no such in common."""
BEAT_S = 0.25
"""Between two words of a side that has nothing to say; whoever is silent for ``stall_s`` is lost."""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""What ZeroMQ says of a connection whose other side has another key, or none."""
MAX_HEAD_BYTES = 16 << 20
"""Of a message but for the frames behind it: the largest is the configuration, with the model's card and chat templates."""
PIECE_BYTES = 1 << 20
"""Of a payload in one message."""
MOST_BYTES = (1 << 31) - 1
"""Of any frame that the first host may send: how large they are is known from what it says first."""


class Join(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A host asks to take part."""

    version: int
    host: int
    """Which one it is, from 1."""
    sources: str
    """See `quintet.executor.kv_transfer.kv_identity.sources`."""


class Welcome(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """What is computed."""

    epoch: int
    """Of the executor."""
    config: bytes
    """JSON of an `EngineConfig`, without what is the first host's alone."""


class Parts(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """What a host would compute with; see `quintet.executor.kv_transfer.kv_identity.parts_of`."""

    parts: dict[str, str]


class Begin(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """It may begin."""


class Refused(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """It may not."""

    words: str
    is_final: bool
    """Whether asking again changes nothing."""


class LinkOrder(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """An order on a link."""

    link: int
    order: tuple[int, int, int, int, int, int, int]
    """The fields of `quintet.executor.distributed.parallel.library.COrder`."""


class LinkProgress(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """So many orders of a link were carried out; 0: whoever hears them is there."""

    link: int
    orders: int


class LinkNote(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """What those who hear a link say of themselves; see `quintet.executor.distributed.parallel.library.Note`."""

    link: int
    progress: int
    chores: int


class HostHeartbeat(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Somebody is there."""


class PayloadChunk(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Bytes of the payload of the order that a link is told next."""

    link: int


class CollectiveRows(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """What a rank has left for a meeting, or a piece of it: rows, which are the frame behind this one."""

    host: int
    """That of the rank."""
    to: int
    """The host that they are for."""
    offset: int
    """In the memory that ranks share."""
    row_bytes: int
    stride: int


class CollectivesDone(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The ranks of a host have come to so many meetings; what they left for them has been told."""

    host: int
    to: int
    meetings: int


OfLink = PayloadChunk | LinkOrder | LinkProgress | LinkNote
OfRanks = CollectiveRows | CollectivesDone
Carried = OfLink | OfRanks
FromMember = Join | Parts | HostHeartbeat | Carried
FromHub = Welcome | Begin | Refused | HostHeartbeat | Carried


class HostLost(ExpectedEnd):
    """The other side is gone, or has said what makes no sense; the message says which side."""


class Senseless(Exception):
    """What the other side says cannot be; the message goes on from who that is."""


def most_bytes(shape: CRanksShape, library: RanksLibrary) -> int:
    """Return the bytes of the largest frame on a link of this shape."""
    arrays = 12 * shape.max_tokens + 32 * shape.max_rows + 8 * shape.max_outputs
    tables = 4 * shape.tables * shape.max_rows * shape.table_stride
    return int(max(arrays + tables, 4 * library.mail_ints, PIECE_BYTES, MAX_HEAD_BYTES))


assert MOST_RANKS < 1 << 16, "hosts and links are numbered"
