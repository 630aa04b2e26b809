"""Validation of requests and results of a shared store, and of key columns. Part of `quintet.wire.kv_disk_validate`."""

from __future__ import annotations

from quintet.wire.columns import ID_BYTES, all_below
from quintet.wire.kv_disk import KEY_BYTES
from quintet.wire.kv_store import StoreRequests, StoreResults
from quintet.wire.params import MAX_COUNT

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
