"""What core and executor tell each other of blocks that are kept on disk (`quintet.core.kv.disk_pool`).

A *place* is room for one block on disk, a number below `quintet.wire.step.Capacity.num_disk_blocks`. A block's *key* names its
content: the chained hash of its tokens and all before them, and its group of layers. Every message names the tables that it is
about; one that is about others is dropped, and nobody waits for it.
"""

from __future__ import annotations

import msgspec

KEY_BYTES = (32, 34)
"""Of a key of the first group, and of any other."""

MAX_KEPT = 1 << 15
"""Places that one `KvKept` tells of at most."""


class KvOrders(msgspec.Struct, array_like=True, tag="kv_orders", gc=False):
    """Core to executor: store these, and fetch those. Takes its turn among the plans: blocks hold what those before it wrote."""

    tables: int
    """`quintet.wire.step.Capacity.tables`"""
    stores: bytes = b""
    """int32 pairs ``device block, place``"""
    store_keys: list[bytes] = []
    fetches: bytes = b""
    """int32 pairs ``place, host block``"""
    fetch_keys: list[bytes] = []


class KvAnswers(msgspec.Struct, array_like=True, tag="kv_answers", gc=False):
    """Executor to core: what became of orders."""

    executor_epoch: int
    tables: int
    stored: list[bytes] = []
    """Keys of blocks that are on disk now."""
    unstored: list[bytes] = []
    """Keys of those that are not: the disk is too slow or full. Their places hold nothing."""
    fetched: bytes = b""
    """int32: host blocks that hold what was ordered."""
    missed: bytes = b""
    """int32: host blocks that do not: it was not there any more, or not whole."""
    fetch_ns: int = 0
    """How long reading took, of all of these."""


class KvKept(msgspec.Struct, array_like=True, tag="kv_kept", gc=False):
    """Executor to core, before the `quintet.wire.step.Capacity` that it belongs to: some of what the disk holds already."""

    executor_epoch: int
    tables: int
    places: bytes
    """int32, those that were used longest ago first"""
    keys: list[bytes]


class DiskRang(msgspec.Struct, array_like=True, tag="disk_rang", gc=False):
    """The thread that reads and writes has answers: it tells the executor's loop. Never sent."""

    count: int
