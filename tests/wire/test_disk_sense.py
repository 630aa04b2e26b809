"""Messages about blocks on disk: lengths that agree, numbers in their ranges; anything else is dropped at the inbox."""

from __future__ import annotations

import msgspec
import pytest

from quintet.wire.codec import pack_i32
from quintet.wire.kv_disk import FileAnswer, FileOrder, KvAnswers, KvKept, KvOrders
from quintet.wire.kv_disk_validate import disk_checks, fits_elsewhere
from quintet.wire.kv_store import Found, Get, Put, Search, StoreAnswers, StoreOrders
from quintet.wire.step import Capacity

CHECKS = disk_checks(num_blocks=8, num_host_blocks=6, num_places=4)
KEY, OF_GROUP = b"k" * 32, b"k" * 34


def store(order: Put | Search | Get) -> KvOrders:
    match order:
        case Put():
            return KvOrders(0, store=StoreOrders(puts=[order]))
        case Search():
            return KvOrders(0, store=StoreOrders(searches=[order]))
        case Get():
            return KvOrders(0, store=StoreOrders(gets=[order]))


def makes_sense(message: msgspec.Struct) -> bool:
    return CHECKS[type(message)](message)


@pytest.mark.parametrize(
    "message",
    [
        KvOrders(0),
        KvOrders(3, pack_i32([7, 3]), [KEY], pack_i32([3, 5, 0, 0]), [KEY, OF_GROUP]),
        KvOrders(0, drops=pack_i32([3]), drop_keys=[KEY]),
        KvOrders(
            0, files=[FileOrder(1, "export", "a.kv", pack_i32([3]), [KEY]), FileOrder(2, "look", "a.kv")]
        ),
        KvAnswers(1, 0, files=[FileAnswer(1, "", [KEY])]),
        KvAnswers(1, 0, [KEY], [OF_GROUP], pack_i32([5]), pack_i32([0]), 9),
        KvKept(1, 0, pack_i32([3, 0]), [KEY, OF_GROUP]),
        store(Put(pack_i32([7, 0]), [KEY, OF_GROUP])),
        store(Search(1, [[KEY, OF_GROUP], []])),
        store(Get(OF_GROUP, 2, pack_i32([1]), pack_i32([5]), [KEY])),
        KvAnswers(1, 0, store=StoreAnswers([KEY], [KEY], [Found(1, pack_i32([9]))], fetched=pack_i32([5]))),
    ],
)
def test_what_can_be_passes(message: msgspec.Struct) -> None:
    assert makes_sense(message)


@pytest.mark.parametrize(
    "message",
    [
        KvOrders(-1),
        KvOrders(0, pack_i32([8, 3]), [KEY]),
        KvOrders(0, pack_i32([7, 4]), [KEY]),
        KvOrders(0, pack_i32([7, 3]), []),
        KvOrders(0, pack_i32([7, 3]), [KEY[:31]]),
        KvOrders(0, fetches=pack_i32([3, 6]), fetch_keys=[KEY]),
        KvOrders(0, fetches=pack_i32([-1, 0]), fetch_keys=[KEY]),
        KvOrders(0, drops=pack_i32([4]), drop_keys=[KEY]),
        KvOrders(0, drops=pack_i32([3])),
        KvOrders(0, files=[FileOrder(1, "import", "../a.kv")]),
        KvOrders(0, files=[FileOrder(1, "import", "a.kv", pack_i32([4]), [KEY])]),
        KvAnswers(1, 0, files=[FileAnswer(1, "", [b"k"])]),
        KvAnswers(0, 0),
        KvAnswers(1, 0, fetched=pack_i32([6])),
        KvAnswers(1, 0, missed=b"abc"),
        KvAnswers(1, 0, [b""]),
        KvAnswers(1, 0, fetch_ns=-1),
        KvKept(1, 0, pack_i32([4]), [KEY]),
        KvKept(1, 0, pack_i32([3]), [KEY, KEY]),
        store(Put(pack_i32([8]), [KEY])),
        store(Put(b"", [])),
        store(Search(-1, [[KEY]])),
        store(Search(1, [[b"k"]])),
        store(Get(b"k", 2, pack_i32([1]), pack_i32([5]), [KEY])),
        store(Get(KEY, 2, pack_i32([2]), pack_i32([5]), [KEY])),
        store(Get(KEY, 2, pack_i32([1]), pack_i32([6]), [KEY])),
        KvAnswers(1, 0, store=StoreAnswers([b"k"])),
        KvAnswers(1, 0, store=StoreAnswers(found=[Found(1, b"abc")])),
        KvAnswers(1, 0, store=StoreAnswers(missed=pack_i32([6]))),
        KvAnswers(1, 0, store=StoreAnswers(get_ns=-1)),
        KvAnswers(1, 0, store=StoreAnswers(num_gets=-1)),
    ],
)
def test_what_cannot_be_does_not(message: msgspec.Struct) -> None:
    assert not makes_sense(message)


def test_where_there_is_no_disk_nothing_is_ordered() -> None:
    assert not disk_checks(8, 0, 0)[KvOrders](KvOrders(0, pack_i32([0, 0]), [KEY]))


@pytest.mark.parametrize(
    ("num_host_blocks", "num_staging_blocks", "num_disk_blocks", "fits"),
    [
        (2, 4, 4, True),
        (0, 0, 0, True),
        (3, 4, 4, False),
        (2, 4, 5, False),
        (-1, 4, 4, False),
        (2, -1, 4, False),
    ],
)
def test_an_executor_has_no_more_than_it_may(
    num_host_blocks: int, num_staging_blocks: int, num_disk_blocks: int, fits: bool
) -> None:
    capacity = Capacity(
        1, 8, 16, 4, 64,
        num_host_blocks=num_host_blocks, num_staging_blocks=num_staging_blocks, num_disk_blocks=num_disk_blocks,
    )  # fmt: skip
    assert fits_elsewhere(capacity, 6, 4) == fits
