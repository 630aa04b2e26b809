"""Validation of admin messages: part of `quintet.wire.validate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quintet.wire.columns import ID_BYTES, all_below
from quintet.wire.kv_admin import DIGEST_BYTES, MAX_LISTED, MAX_NAME, KvPins, KvPrefix, KvQuery, KvReport
from quintet.wire.kv_disk_validate import is_file_name
from quintet.wire.kv_store_validate import are_keys

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
