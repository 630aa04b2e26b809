"""Protocol between the first host's hub and each other host's member, over one connection each.

    member                                hub, on the first host
      Join ─────────────────────────────────▶  same protocol and sources, free node rank
      ◀─────────────────────────── Welcome     the configuration
      HostParts ────────────────────────────▶  same weights and kernels
      ◀───────────────────────────── Begin     the member starts its ranks
      ◀─ LinkOrder, LinkProgress, LinkNote, HostHeartbeat ─▶

Ranks of one stage on several hosts also use `CollectiveRows` and `CollectivesDone`, each with a destination host.

Two frames follow a `LinkOrder`: the step's arrays (``csrc/cpu/ranks/step_bytes.cpp``) or the order's items, and its payload.
A long payload is split: `PayloadChunk` messages of one frame each precede the order with all but the last chunk. Each
received chunk also counts as a heartbeat on a slow network.
"""

from __future__ import annotations

import msgspec
import zmq

from quintet.executor.distributed.parallel.follower_processes import ExpectedEnd
from quintet.executor.distributed.parallel.library import CRanksShape, RanksLibrary
from quintet.executor.model_config.fitting import MOST_RANKS

VERSION = 2
GROUP_KEY = ("--group-key", b"quintet hosts")
"""The flag of the key file, and the context for key derivation."""
RUNNER = "hosts"
"""Identity of stored KV memory in `kv_identity`; hosts share none, so it is a constant."""
BEAT_S = 0.25
"""Heartbeat interval in seconds; a host without messages for ``stall_s`` is lost."""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""ZeroMQ events of a failed handshake: the other side's key differs or is missing."""
MAX_HEAD_BYTES = 16 << 20
"""Maximum size of a message's first frame; the largest is the configuration, with chat templates."""
CHUNK_BYTES = 1 << 20
"""Payload bytes per message."""
MOST_BYTES = (1 << 31) - 1
"""Maximum frame size from the hub, before the configuration determines it."""


class Join(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A host requests to take part."""

    version: int
    host: int
    """Node rank, from 1."""
    sources: str
    """See `quintet.executor.kv_transfer.kv_identity.sources`."""


class Welcome(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The configuration for a host."""

    epoch: int
    """Epoch of the executor."""
    config: bytes
    """JSON of an `EngineConfig` without the first host's local settings."""


class HostParts(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A host's identity parts: weights and kernels; see `quintet.executor.kv_transfer.kv_identity.parts_of`."""

    parts: dict[str, str]


class Begin(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The host may start its ranks."""


class HostRefused(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The host may not take part."""

    reason: str
    is_final: bool
    """True if a retry cannot succeed."""


class LinkOrder(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """An order on a link."""

    link: int
    order: tuple[int, int, int, int, int, int, int]
    """The fields of `quintet.executor.distributed.parallel.library.COrder`."""


class LinkProgress(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Number of finished orders of a link; 0: the receiving rank is ready."""

    link: int
    orders: int


class LinkNote(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Notes of the receiving ranks of a link; see `quintet.executor.distributed.parallel.library.Note`."""

    link: int
    progress: int
    idle_tasks: int


class HostHeartbeat(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Sent at each heartbeat interval."""


class PayloadChunk(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """A chunk of the payload of the link's next order."""

    link: int


class CollectiveRows(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Rows that a rank contributes to a collective, or a chunk of them; the rows are in the next frame."""

    host: int
    """Host of the rank."""
    to: int
    """Destination host."""
    offset: int
    """Offset in the ranks' shared memory."""
    row_bytes: int
    stride: int


class CollectivesDone(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The ranks of a host have arrived at so many collectives; their contributions were sent before."""

    host: int
    to: int
    collectives: int


LinkMessage = PayloadChunk | LinkOrder | LinkProgress | LinkNote
CollectiveMessage = CollectiveRows | CollectivesDone
Carried = LinkMessage | CollectiveMessage
FromMember = Join | HostParts | HostHeartbeat | Carried
FromHub = Welcome | Begin | HostRefused | HostHeartbeat | Carried


class HostLost(ExpectedEnd):
    """The other side disconnected, or sent an invalid message; the message names the side."""


class InvalidMessage(Exception):
    """An invalid message of another host; the text continues a sentence that starts with the host."""


def most_bytes(shape: CRanksShape, library: RanksLibrary) -> int:
    """Return the maximum frame size on a link of this shape in bytes."""
    arrays = 12 * shape.max_tokens + 32 * shape.max_rows + 8 * shape.max_outputs
    tables = 4 * shape.tables * shape.max_rows * shape.table_stride
    return int(max(arrays + tables, 4 * library.item_ints, CHUNK_BYTES, MAX_HEAD_BYTES))


assert MOST_RANKS < 1 << 16, "host and link numbers have 16 bits"
