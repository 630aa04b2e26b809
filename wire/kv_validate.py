"""Validation of messages about KV: tiers (host memory, disk, shared store, other servers) and admin commands.

Part of `quintet.wire.validate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from quintet.wire.codec import ID_BYTES, all_below
from quintet.wire.config import EngineConfig
from quintet.wire.ids import MAX_ID
from quintet.wire.kv_admin import DIGEST_BYTES, MAX_LISTED, MAX_NAME, KvPrefix, KvQuery, KvReport
from quintet.wire.kv_tiers import KEY_BYTES, Fetch, KvPins, KvTierRequests, KvTierResults
from quintet.wire.params import MAX_COUNT
from quintet.wire.request import MAX_PEER_CHARS, KvTransfer
from quintet.wire.step import Capacity

MAX_SLOTS = 1 << 10


def are_below(column: bytes, limit: int) -> bool:
    """Return True when the int32 values are from 0 up to a limit, which may be 0."""
    return not len(column) % ID_BYTES and (not column or (limit > 0 and all_below(column, limit)))


def are_keys(keys: list[bytes]) -> bool:
    """Return True when these have the length of block keys."""
    return all(len(key) in KEY_BYTES for key in keys)


def are_named(column: bytes, limit: int, keys: list[bytes]) -> bool:
    """Return True when these are int32 below a limit, each with a key."""
    return len(column) == ID_BYTES * len(keys) and are_keys(keys) and are_below(column, limit)


FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def max_tier_blocks(config: EngineConfig) -> tuple[int, int]:
    """Return the maximum number of blocks in host memory, and on disk."""
    num_blocks, cache = config.model.kv.num_offloaded_blocks, config.cache
    host_bytes = [cache.swap_bytes, *(tier.staging_bytes for tier in cache.remote_tiers)]
    return sum(map(num_blocks, host_bytes)), 0 if cache.disk is None else num_blocks(cache.disk.size_bytes)


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
    sizes = [capacity.num_host_blocks, *(tier.num_staging_blocks for tier in capacity.tiers)]
    return (
        min(sizes) >= 0
        and sum(sizes) <= num_host_blocks
        and len({tier.tier for tier in capacity.tiers}) == len(capacity.tiers)
        and all(
            0 <= tier.num_places <= num_places and 0 <= tier.max_storing_blocks <= MAX_COUNT
            for tier in capacity.tiers
        )
    )


def is_fetch(fetch: Fetch, num_host_blocks: int) -> bool:
    """Return True when the fetch is valid for this number of host blocks."""
    return (
        (fetch.num_blocks == 1 or are_keys([fetch.source]))
        and len(fetch.source) <= MAX_PEER_CHARS
        and 0 < fetch.num_blocks <= MAX_COUNT
        and are_named(fetch.host_blocks, num_host_blocks, fetch.keys)
        and are_named(fetch.positions, fetch.num_blocks, fetch.keys)
    )


def tier_checks(num_blocks: int, num_host_blocks: int) -> dict[type[msgspec.Struct], Callable[[Any], bool]]:
    """Return the check of each kind of message, for these numbers of device blocks and host blocks."""

    def are_requests(message: KvTierRequests) -> bool:
        return (
            0 <= message.tables_epoch <= MAX_COUNT
            and all(each.keys and are_named(each.blocks, num_blocks, each.keys) for each in message.stores)
            and all(is_fetch(fetch, num_host_blocks) for fetch in message.fetches)
            and all(
                0 <= search.request_id < MAX_ID and all(map(are_keys, search.chains))
                for search in message.searches
            )
            and are_keys(message.drops)
            and all(
                0 <= each.task_id <= MAX_COUNT and is_file_name(each.name) and are_keys(each.keys)
                for each in message.files
            )
        )

    def are_results(message: KvTierResults) -> bool:
        return (
            0 < message.executor_epoch <= MAX_COUNT
            and 0 <= message.tables_epoch <= MAX_COUNT
            and are_keys([*message.stored, *message.unstored, *message.lost])
            and are_below(message.fetched, num_host_blocks)
            and are_below(message.missed, num_host_blocks)
            and all(
                0 <= found.request_id < MAX_ID and are_below(found.counts, MAX_COUNT)
                for found in message.found
            )
            and all(0 <= each <= MAX_COUNT for each in (message.num_fetches, message.num_searches))
            and all(0 <= each < MAX_ID for each in (message.fetch_ns, message.search_ns))
            and all(0 <= each.task_id <= MAX_COUNT and are_keys(each.keys) for each in message.files)
        )

    return {KvTierRequests: are_requests, KvTierResults: are_results}


def is_kv_transfer(kv_transfer: KvTransfer) -> bool:
    """Return True when the fields have bounded size. The core checks the peer itself."""
    return len(kv_transfer.peer) <= MAX_PEER_CHARS and 0 <= kv_transfer.num_blocks <= MAX_COUNT


def is_file_name(name: str) -> bool:
    """Return True for a safe file name: no path separators, not hidden."""
    return FILE_NAME.fullmatch(name) is not None


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
            0 <= message.query_id < MAX_ID
            and 0 <= message.frontend < MAX_SLOTS
            and len(message.name) <= MAX_NAME
            and 0 <= message.limit <= MAX_LISTED
            and are_tokens(message.token_ids)
            and len(message.token_ids) <= ID_BYTES * max_len
            and (not message.file or is_file_name(message.file))
        ),
        KvReport: lambda message: (
            0 <= message.query_id < MAX_ID
            and 0 <= message.core < MAX_SLOTS
            and len(message.prefixes) <= MAX_LISTED
            and all(map(is_prefix, message.prefixes))
        ),
        KvPins: are_pins,
    }
