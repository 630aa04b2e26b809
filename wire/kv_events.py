"""KV events for external routers, in the format of vLLM 0.32: events are msgpack maps.

A batch has three frames: topic, sequence number (8 bytes, big-endian), and the batch. Hashes are the lowest 64 bits
of the prefix cache's digests. Fields without a default here are required by subscribers.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"
"""Memory kind in the events, on every device: routers expect this name."""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Publication of KV events."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Endpoint of engine 0; each further engine uses the next port."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Maximum batches queued per subscriber."""
    topic: str = ""


def address_for(endpoint: str, engine: int) -> str:
    """Return the address of one engine: the port plus its index. For an endpoint without a port, append the index."""
    head, _, port = endpoint.rpartition(":")
    if not engine:
        return endpoint
    return f"{head}:{int(port) + engine}" if port.isdigit() else f"{endpoint}-{engine}"


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """Full blocks that are now reusable, in sequence order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the preceding block; None for the first block."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str]] | None = None
    """Additional hash inputs of each block: a digest of the request's salt and adapter, or of embeddings."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False, frozen=True):
    """All blocks are gone: a new core or executor starts."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Events of one loop iteration, in order."""

    ts: float
    """Seconds since 1970."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None
    """Index of the engine."""
