"""Validation of KV tier messages: equal lengths, numbers in range; others are dropped at the inbox."""

from __future__ import annotations

import msgspec
import pytest

from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import (
    Fetch,
    FileRequest,
    FileResult,
    KvTierRequests,
    KvTierResults,
    Search,
    SearchResult,
    Store,
    TierCapacity,
    TierName,
)
from quintet.wire.kv_validate import fits_tiers, tier_checks
from quintet.wire.step import Capacity

CHECKS = tier_checks(num_blocks=8, num_host_blocks=6)
KEY, OF_GROUP = b"k" * 32, b"k" * 34


def store(blocks: list[int], keys: list[bytes], tier: TierName = "store") -> KvTierRequests:
    return KvTierRequests(0, tier, [Store(pack_i32(blocks), keys)])


def fetch(
    source: bytes, num_blocks: int, position: int, host_block: int, tier: TierName = "store"
) -> KvTierRequests:
    wanted = Fetch(source, num_blocks, pack_i32([position]), pack_i32([host_block]), [KEY])
    return KvTierRequests(0, tier, fetches=[wanted])


def search(request_id: int, *chains: list[bytes]) -> KvTierRequests:
    return KvTierRequests(0, "store", searches=[Search(request_id, [*chains])])


def is_valid(message: msgspec.Struct) -> bool:
    return CHECKS[type(message)](message)


@pytest.mark.parametrize(
    "message",
    [
        KvTierRequests(0, "disk"),
        store([7], [KEY], tier="disk"),
        fetch(b"", 1, 0, 5, "disk"),
        KvTierRequests(3, "disk", drops=[KEY]),
        KvTierRequests(
            *(0, "disk"),
            files=[FileRequest(1, "export", "a.kv", [KEY]), FileRequest(2, "look", "a.kv")],
        ),
        store([7, 0], [KEY, OF_GROUP]),
        search(1, [KEY, OF_GROUP], []),
        fetch(OF_GROUP, 2, 1, 5),
        store([7], [KEY], tier="peer"),
        fetch(b"10.0.0.7:5600", 1, 0, 5, "peer"),
        KvTierResults(1, 0, "disk", files=[FileResult(1, "", [KEY])]),
        KvTierResults(1, 0, "disk", [KEY], [OF_GROUP], pack_i32([5]), pack_i32([0]), [KEY], 9, 9),
        KvTierResults(1, 0, "store", found=[SearchResult(1, pack_i32([9]))]),
    ],
)
def test_valid_messages_pass(message: msgspec.Struct) -> None:
    assert is_valid(message)


@pytest.mark.parametrize(
    "message",
    [
        KvTierRequests(-1, "disk"),
        store([8], [KEY], tier="disk"),
        store([7], [], tier="disk"),
        store([7], [KEY, OF_GROUP], tier="disk"),
        store([7], [KEY[:31]], tier="disk"),
        fetch(b"", 4, 3, 6, "disk"),
        fetch(b"", 4, -1, 0, "disk"),
        fetch(b"", 4, 4, 0, "disk"),
        KvTierRequests(0, "disk", drops=[KEY[:31]]),
        KvTierRequests(0, "disk", files=[FileRequest(1, "import", "../a.kv")]),
        KvTierRequests(0, "disk", files=[FileRequest(1, "import", "a.kv", [KEY[:31]])]),
        store([8], [KEY]),
        store([], []),
        search(-1, [KEY]),
        search(1, [b"k"]),
        fetch(b"k", 2, 1, 5),
        fetch(KEY, 2, 2, 5),
        fetch(KEY, 2, 1, 6),
        fetch(b"h" * 1000, 1, 0, 5, "peer"),
        KvTierResults(0, 0, "disk"),
        KvTierResults(1, 0, "disk", files=[FileResult(1, "", [b"k"])]),
        KvTierResults(1, 0, "disk", fetched=pack_i32([6])),
        KvTierResults(1, 0, "disk", missed=b"abc"),
        KvTierResults(1, 0, "disk", [b""]),
        KvTierResults(1, 0, "disk", lost=[b"k"]),
        KvTierResults(1, 0, "disk", fetch_ns=-1),
        KvTierResults(1, 0, "store", found=[SearchResult(1, b"abc")]),
        KvTierResults(1, 0, "store", search_ns=-1),
        KvTierResults(1, 0, "store", num_fetches=-1),
        KvTierResults(1, -1, "disk", [KEY]),
    ],
)
def test_invalid_messages_are_dropped(message: msgspec.Struct) -> None:
    assert not is_valid(message)


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
    disk = TierCapacity("disk", num_staging_blocks, num_disk_blocks)
    capacity = Capacity(1, 8, 16, 4, 64, num_host_blocks=num_host_blocks, tiers=[disk])
    assert fits_tiers(capacity, 6, 4) == is_valid_capacity


def test_a_capacity_names_each_back_end_once() -> None:
    capacity = Capacity(1, 8, 16, 4, 64, tiers=[TierCapacity("peer", 1), TierCapacity("peer", 1)])
    assert not fits_tiers(capacity, 6, 4)
