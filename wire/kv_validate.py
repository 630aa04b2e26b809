"""Validation of messages about KV: tiers (host memory, disk, shared store, other servers) and admin commands.

Part of `quintet.wire.validate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from quintet.wire.columns import ID_BYTES, all_below
from quintet.wire.config import EngineConfig
from quintet.wire.kv_admin import DIGEST_BYTES, MAX_LISTED, MAX_NAME, KvPins, KvPrefix, KvQuery, KvReport
from quintet.wire.kv_tiers import (
    KEY_BYTES,
    MAX_KEPT,
    KvTierRequests,
    KvTierResults,
    StoredBlocks,
    StoreRequests,
    StoreResults,
)
from quintet.wire.params import MAX_COUNT
from quintet.wire.request import MAX_PEER_CHARS, KvTransfer
from quintet.wire.step import Capacity

MAX_NS = 1 << 63


def are_below(column: bytes, limit: int) -> bool:
    """Return True when the int32 values are from 0 up to a limit, which may be 0."""
    return not len(column) % ID_BYTES and (not column or (limit > 0 and all_below(column, limit)))


def are_keys(keys: list[bytes]) -> bool:
    """Return True when these have the length of block keys."""
    return all(len(key) in KEY_BYTES for key in keys)


def are_named(column: bytes, limit: int, keys: list[bytes]) -> bool:
    """Return True when these are int32 below a limit, each with a key."""
    return len(column) == ID_BYTES * len(keys) and are_keys(keys) and are_below(column, limit)


def is_store_order(store: StoreRequests | None, num_blocks: int, num_host_blocks: int) -> bool:
    """Return True when the request is valid for these numbers of device blocks and host blocks."""
    return store is None or (
        all(put.keys and are_named(put.blocks, num_blocks, put.keys) for put in store.puts)
        and all(
            0 <= search.request_id < MAX_NS and all(map(are_keys, search.chains)) for search in store.searches
        )
        and all(
            are_keys([get.name])
            and 0 < get.num_blocks <= MAX_COUNT
            and are_named(get.host_blocks, num_host_blocks, get.keys)
            and are_named(get.positions, get.num_blocks, get.keys)
            for get in store.gets
        )
    )


def is_store_answer(store: StoreResults | None, num_host_blocks: int) -> bool:
    """Return True when the results are valid."""
    return store is None or (
        are_keys([*store.kept, *store.unkept, *store.lost])
        and all(
            0 <= found.request_id < MAX_NS and are_below(found.counts, MAX_COUNT) for found in store.found
        )
        and are_below(store.fetched, num_host_blocks)
        and are_below(store.missed, num_host_blocks)
        and all(0 <= each <= MAX_COUNT for each in (store.num_gets, store.num_searches))
        and all(0 <= each < MAX_NS for each in (store.search_ns, store.get_ns))
    )


FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def max_tier_blocks(config: EngineConfig) -> tuple[int, int]:
    """Return the maximum number of blocks in host memory, and on disk."""
    num_blocks, cache = config.model.kv.num_blocks, config.cache
    num_host_blocks = num_blocks(cache.swap_bytes)
    if cache.peers is not None:
        num_host_blocks += num_blocks(cache.peers.staging_bytes)
    if cache.store is not None:
        num_host_blocks += num_blocks(cache.store.staging_bytes)
    if cache.disk is None:
        return num_host_blocks, 0
    return num_host_blocks + num_blocks(cache.disk.staging_bytes), num_blocks(cache.disk.size_bytes)


def are_swaps(swaps: bytes, num_blocks: int, num_host_blocks: int) -> bool:
    """Return True when a column consists of pairs of a device block and a host block in range."""
    if not swaps:
        return True
    if len(swaps) % (2 * ID_BYTES) or not num_host_blocks:
        return False
    pairs = memoryview(swaps).cast("i")
    return all_below(pairs[0::2].tobytes(), num_blocks) and all_below(pairs[1::2].tobytes(), num_host_blocks)


def fits_tiers(capacity: Capacity, num_host_blocks: int, num_places: int) -> bool:
    """Return True when an executor's host and disk blocks do not exceed the configuration."""
    num_staging_blocks = (
        capacity.num_staging_blocks,
        capacity.num_peer_blocks or 0,
        capacity.num_store_blocks,
    )
    return (
        capacity.num_host_blocks >= 0
        and min(num_staging_blocks) >= 0
        and sum(num_staging_blocks) <= num_host_blocks - capacity.num_host_blocks
        and 0 <= capacity.num_disk_blocks <= num_places
    )


def disk_checks(
    num_blocks: int, num_host_blocks: int, num_places: int
) -> dict[type[msgspec.Struct], Callable[[Any], bool]]:
    """Return the check of each kind of message, for these numbers of device blocks, host blocks and disk places."""

    def are_pairs(column: bytes, first: int, second: int, keys: list[bytes]) -> bool:
        if len(column) != 2 * ID_BYTES * len(keys) or not are_keys(keys):
            return False
        pairs = memoryview(column).cast("i")
        return are_below(pairs[0::2].tobytes(), first) and are_below(pairs[1::2].tobytes(), second)

    def are_kept(message: StoredBlocks) -> bool:
        return (
            _is_about_tables(message)
            and len(message.places) == ID_BYTES * len(message.keys)
            and len(message.keys) <= MAX_KEPT
            and are_below(message.places, num_places)
            and are_keys(message.keys)
        )

    return {
        KvTierRequests: lambda message: (
            0 <= message.tables <= MAX_COUNT
            and are_pairs(message.stores, num_blocks, num_places, message.store_keys)
            and are_pairs(message.fetches, num_places, num_host_blocks, message.fetch_keys)
            and are_named(message.drops, num_places, message.drop_keys)
            and are_named(message.offers, num_blocks, message.offer_keys)
            and all(
                0 <= each.task_id <= MAX_COUNT
                and is_file_name(each.name)
                and are_named(each.places, num_places, each.keys)
                for each in message.files
            )
            and all(are_named(pull.host_blocks, num_host_blocks, pull.keys) for pull in message.pulls)
            and is_store_order(message.store, num_blocks, num_host_blocks)
        ),
        KvTierResults: lambda message: (
            _is_about_tables(message)
            and 0 <= message.fetch_ns < MAX_NS
            and are_keys(message.stored)
            and are_keys(message.unstored)
            and are_below(message.fetched, num_host_blocks)
            and are_below(message.missed, num_host_blocks)
            and all(0 <= each.task_id <= MAX_COUNT and are_keys(each.keys) for each in message.files)
            and are_below(message.pulled, num_host_blocks)
            and are_below(message.lacking, num_host_blocks)
            and is_store_answer(message.store, num_host_blocks)
        ),
        StoredBlocks: are_kept,
    }


def is_kv_transfer(kv_transfer: KvTransfer | None) -> bool:
    """Return True when the KV transfer fields have bounded size. The core checks the peer itself."""
    return kv_transfer is None or (
        len(kv_transfer.peer) <= MAX_PEER_CHARS and 0 <= kv_transfer.num_blocks <= MAX_COUNT
    )


def is_file_name(name: str) -> bool:
    """Return True for a safe file name: no path separators, not hidden."""
    return FILE_NAME.fullmatch(name) is not None


def _is_about_tables(message: KvTierResults | StoredBlocks) -> bool:
    return 0 < message.executor_epoch <= MAX_COUNT and 0 <= message.tables <= MAX_COUNT


MAX_NUMBER = 1 << 63
MAX_SLOTS = 1 << 10


def operator_checks(vocab_size: int, max_len: int) -> dict[type[msgspec.Struct], Callable[[Any], bool]]:
    """Return the check of each kind of message, for this vocabulary size and context length."""

    def are_tokens(column: bytes) -> bool:
        return not len(column) % ID_BYTES and all_below(column, vocab_size)

    def are_pins(message: KvPins) -> bool:
        return all(
            len(pin.digest) == DIGEST_BYTES and pin.num_tokens > 0 and are_keys(pin.keys)
            for pin in message.pins
        )

    def is_prefix(prefix: KvPrefix) -> bool:
        return len(prefix.digest) == DIGEST_BYTES and are_tokens(prefix.token_ids)

    return {
        KvQuery: lambda message: (
            0 <= message.query_id < MAX_NUMBER
            and 0 <= message.frontend < MAX_SLOTS
            and len(message.name) <= MAX_NAME
            and 0 <= message.limit <= MAX_LISTED
            and are_tokens(message.token_ids)
            and len(message.token_ids) <= ID_BYTES * max_len
            and (not message.file or is_file_name(message.file))
        ),
        KvReport: lambda message: (
            0 <= message.query_id < MAX_NUMBER
            and 0 <= message.core < MAX_SLOTS
            and len(message.prefixes) <= MAX_LISTED
            and all(map(is_prefix, message.prefixes))
        ),
        KvPins: are_pins,
    }
