"""Validation of KV administration messages: invalid ones are dropped at the inbox."""

from __future__ import annotations

import msgspec
import pytest

from quintet.wire.codec import pack_i32
from quintet.wire.kv_admin import MAX_LISTED, KvPrefix, KvQuery, KvReport
from quintet.wire.kv_tiers import KvPin, KvPins
from quintet.wire.kv_validate import operator_checks

CHECKS = operator_checks(vocab_size=10, max_len=4)
DIGEST = b"d" * 32


def prefix(**changes: object) -> KvPrefix:
    return KvPrefix(
        **(
            {
                "digest": DIGEST,
                "num_tokens": 4,
                "device": 1,
                "host": 0,
                "disk": 0,
                "is_pinned": False,
                "idle_ns": 0,
            }
            | changes
        )
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "is_valid"),
    [
        (KvQuery(1, 0, "pin", "5f0c31a7"), True),
        (KvQuery(1, 0, "list", limit=MAX_LISTED), True),
        (KvQuery(1, 0, "evict", token_ids=pack_i32([9, 0, 1, 2])), True),
        (KvQuery(-1, 0, "list"), False),
        (KvQuery(1, 1 << 10, "list"), False),
        (KvQuery(1, 0, "pin", "5" * 65), False),
        (KvQuery(1, 0, "list", limit=MAX_LISTED + 1), False),
        (KvQuery(1, 0, "pin", token_ids=pack_i32([10])), False),
        (KvQuery(1, 0, "pin", token_ids=pack_i32([1] * 5)), False),
        (KvReport(1, 0, [prefix(token_ids=pack_i32([1]))]), True),
        (KvReport(1, 0, [prefix(digest=b"d")]), False),
        (KvReport(1, 0, [prefix(token_ids=b"abc")]), False),
        (KvReport(1, 0, [prefix()] * (MAX_LISTED + 1)), False),
        (KvReport(1, -1), False),
        (KvPins([KvPin(DIGEST, 4, [DIGEST, DIGEST + b"12"])]), True),
        (KvPins([KvPin(DIGEST, 0, [DIGEST])]), False),
        (KvPins([KvPin(DIGEST, 4, [b"k"])]), False),
    ],
)
def test_validity(message: msgspec.Struct, is_valid: bool) -> None:
    assert CHECKS[type(message)](message) == is_valid
