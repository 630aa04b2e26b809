"""Disk KV cache, KV store and KV transfer in the output of `quintet plan`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quintet.deploy.config.kv.storage import free_bytes
from quintet.deploy.config.memory import format_size
from quintet.wire.config import EngineConfig, KvPeersConfig, KvStoreConfig

Rows = list[tuple[str, str]]


class KvDiskPlan(msgspec.Struct, frozen=True):
    """Disk KV cache of each engine."""

    folder: str
    size_bytes: int
    num_blocks: int
    staging_bytes: int
    """Maximum host memory for reading blocks."""
    free_bytes: int
    """Free disk space."""


def disk_plan(config: EngineConfig) -> KvDiskPlan | None:
    """Return the plan of the disk KV cache, or None."""
    disk = config.cache.disk
    if disk is None:
        return None
    num_blocks = config.model.kv.num_offloaded_blocks(disk.size_bytes)
    free = free_bytes(Path(disk.folder))
    parts = config.cache.num_parts
    return KvDiskPlan(disk.folder, disk.size_bytes * parts, num_blocks, disk.staging_bytes * parts, free)


def store_plan(config: EngineConfig) -> KvStoreConfig | None:
    """Return the KV store section with memory summed over ranks, or None."""
    store, parts = config.cache.store, config.cache.num_parts
    if store is None:
        return None
    return msgspec.structs.replace(store, staging_bytes=store.staging_bytes * parts)


def peers_plan(config: EngineConfig) -> KvPeersConfig | None:
    """Return the KV transfer section with memory summed over ranks, or None."""
    peers, parts = config.cache.peers, config.cache.num_parts
    if peers is None:
        return None
    staging_bytes, offered_bytes = peers.staging_bytes * parts, peers.offered_bytes * parts
    return msgspec.structs.replace(peers, staging_bytes=staging_bytes, offered_bytes=offered_bytes)


def rows_of(
    disk: KvDiskPlan | None, store: KvStoreConfig | None, peers: KvPeersConfig | None, block_size: int
) -> Rows:
    """Return text rows: label, value."""
    rows: Rows = []
    if disk is not None:
        words = (
            f"{format_size(disk.size_bytes)} in {disk.folder}: {disk.num_blocks:,} blocks of {block_size} tokens, per"
            f" engine; {format_size(disk.free_bytes)} free on disk; {format_size(disk.staging_bytes)} of read buffers"
        )
        rows.append(("KV on disk", words))
    if store is not None:
        size = format_size(store.size_bytes)
        bound = f"{size} for all servers" if store.size_bytes else "size limited by the storage"
        memory = format_size(store.staging_bytes + store.waiting_bytes)
        rows.append(("KV store", f"{store.url}, {bound}; {memory} of memory per engine"))
    if peers is not None:
        words = peers.role
        if peers.listen:
            words += (
                f"; offered at {peers.listen}, in {format_size(peers.offered_bytes)} of memory per engine"
            )
        if peers.allowed:
            words += f"; fetched from {', '.join(peers.allowed)} into {format_size(peers.staging_bytes)}"
        rows.append(("KV transfer", words))
    return rows
