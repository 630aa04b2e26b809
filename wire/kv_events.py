"""What outside routers hear of an engine's KV memory, in the form that vLLM 0.32 publishes: events are msgpack maps.

A batch travels as three frames: topic, sequence number (8 bytes, the highest first), and the batch. Hashes are the lowest 64 bits
of the prefix cache's digests. What has no default here has none there, and is refused where it is missing.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"
"""What routers call the memory that an engine computes in, whichever it is."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """Full blocks that requests can begin behind from now on, one after the other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the block before them; None at a beginning."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str]] | None = None
    """For each block, what its hash is of beside tokens: a digest of the request's salt or vectors."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """Blocks that are no longer there."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """There is nothing any more: another core or executor begins."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What happened in one turn, in order."""

    ts: float
    """Seconds since 1970."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None
    """The engine."""
