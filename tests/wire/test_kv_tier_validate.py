"""Validation of KV tier messages: equal lengths, numbers in range; others are dropped at the inbox."""

from __future__ import annotations

import msgspec
import pytest

from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import (
    FileRequest,
    FileResult,
    Get,
    KvTierRequests,
    KvTierResults,
    LookupResult,
    Put,
    Search,
    StoredBlocks,
    StoreRequests,
    StoreResults,
)
from quintet.wire.kv_validate import disk_checks, fits_tiers
from quintet.wire.step import Capacity

CHECKS = disk_checks(num_blocks=8, num_host_blocks=6, num_places=4)
KEY, OF_GROUP = b"k" * 32, b"k" * 34


def store(order: Put | Search | Get) -> KvTierRequests:
    match order:
        case Put():
            return KvTierRequests(0, store=StoreRequests(puts=[order]))
        case Search():
            return KvTierRequests(0, store=StoreRequests(searches=[order]))
        case Get():
            return KvTierRequests(0, store=StoreRequests(gets=[order]))


def is_valid(message: msgspec.Struct) -> bool:
    return CHECKS[type(message)](message)


@pytest.mark.parametrize(
    "message",
    [
        KvTierRequests(0),
        KvTierRequests(3, pack_i32([7, 3]), [KEY], pack_i32([3, 5, 0, 0]), [KEY, OF_GROUP]),
        KvTierRequests(0, drops=pack_i32([3]), drop_keys=[KEY]),
        KvTierRequests(
            0, files=[FileRequest(1, "export", "a.kv", pack_i32([3]), [KEY]), FileRequest(2, "look", "a.kv")]
        ),
        KvTierResults(1, 0, files=[FileResult(1, "", [KEY])]),
        KvTierResults(1, 0, [KEY], [OF_GROUP], pack_i32([5]), pack_i32([0]), 9),
        StoredBlocks(1, 0, pack_i32([3, 0]), [KEY, OF_GROUP]),
        store(Put(pack_i32([7, 0]), [KEY, OF_GROUP])),
        store(Search(1, [[KEY, OF_GROUP], []])),
        store(Get(OF_GROUP, 2, pack_i32([1]), pack_i32([5]), [KEY])),
        KvTierResults(
            1, 0, store=StoreResults([KEY], [KEY], [LookupResult(1, pack_i32([9]))], fetched=pack_i32([5]))
        ),
    ],
)
def test_valid_messages_pass(message: msgspec.Struct) -> None:
    assert is_valid(message)


@pytest.mark.parametrize(
    "message",
    [
        KvTierRequests(-1),
        KvTierRequests(0, pack_i32([8, 3]), [KEY]),
        KvTierRequests(0, pack_i32([7, 4]), [KEY]),
        KvTierRequests(0, pack_i32([7, 3]), []),
        KvTierRequests(0, pack_i32([7, 3]), [KEY[:31]]),
        KvTierRequests(0, fetches=pack_i32([3, 6]), fetch_keys=[KEY]),
        KvTierRequests(0, fetches=pack_i32([-1, 0]), fetch_keys=[KEY]),
        KvTierRequests(0, drops=pack_i32([4]), drop_keys=[KEY]),
        KvTierRequests(0, drops=pack_i32([3])),
        KvTierRequests(0, files=[FileRequest(1, "import", "../a.kv")]),
        KvTierRequests(0, files=[FileRequest(1, "import", "a.kv", pack_i32([4]), [KEY])]),
        KvTierResults(1, 0, files=[FileResult(1, "", [b"k"])]),
        KvTierResults(0, 0),
        KvTierResults(1, 0, fetched=pack_i32([6])),
        KvTierResults(1, 0, missed=b"abc"),
        KvTierResults(1, 0, [b""]),
        KvTierResults(1, 0, fetch_ns=-1),
        StoredBlocks(1, 0, pack_i32([4]), [KEY]),
        StoredBlocks(1, 0, pack_i32([3]), [KEY, KEY]),
        store(Put(pack_i32([8]), [KEY])),
        store(Put(b"", [])),
        store(Search(-1, [[KEY]])),
        store(Search(1, [[b"k"]])),
        store(Get(b"k", 2, pack_i32([1]), pack_i32([5]), [KEY])),
        store(Get(KEY, 2, pack_i32([2]), pack_i32([5]), [KEY])),
        store(Get(KEY, 2, pack_i32([1]), pack_i32([6]), [KEY])),
        KvTierResults(1, 0, store=StoreResults([b"k"])),
        KvTierResults(1, 0, store=StoreResults(found=[LookupResult(1, b"abc")])),
        KvTierResults(1, 0, store=StoreResults(missed=pack_i32([6]))),
        KvTierResults(1, 0, store=StoreResults(get_ns=-1)),
        KvTierResults(1, 0, store=StoreResults(num_gets=-1)),
    ],
)
def test_invalid_messages_are_dropped(message: msgspec.Struct) -> None:
    assert not is_valid(message)


def test_without_a_disk_no_request_is_valid() -> None:
    assert not disk_checks(8, 0, 0)[KvTierRequests](KvTierRequests(0, pack_i32([0, 0]), [KEY]))


@pytest.mark.parametrize(
    ("num_host_blocks", "num_staging_blocks", "num_disk_blocks", "is_valid_capacity"),
    [
        (2, 4, 4, True),
        (0, 0, 0, True),
        (3, 4, 4, False),
        (2, 4, 5, False),
        (-1, 4, 4, False),
        (2, -1, 4, False),
    ],
)
def test_capacity_is_bounded_by_the_configuration(
    num_host_blocks: int, num_staging_blocks: int, num_disk_blocks: int, is_valid_capacity: bool
) -> None:
    capacity = Capacity(
        1, 8, 16, 4, 64,
        num_host_blocks=num_host_blocks, num_staging_blocks=num_staging_blocks, num_disk_blocks=num_disk_blocks,
    )  # fmt: skip
    assert fits_tiers(capacity, 6, 4) == is_valid_capacity
