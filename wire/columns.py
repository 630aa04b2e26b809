"""Packed columns of the messages, and range checks on them. ``wire/validate.py`` provides the ranges."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from quintet.wire import kv_tiers as k
from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.request import RequestSpec

COLUMNS: Mapping[type[msgspec.Struct], Mapping[str, str]] = {
    m.TokenPrompt: {"token_ids": "i"},
    RequestSpec: {"output_ids": "i"},
    m.Admit: {"prompt_ids": "i"},
    m.Live: {"request_ids": "q"},
    m.InFlightReport: {"request_ids": "q", "attempts": "i"},
    m.Unknown: {"request_ids": "q"},
    m.Open: {"prompt_ids": "i", "output_ids": "i"},
    m.Tokens: {
        "request_ids": "q",
        "first_indexes": "i",
        "num_tokens": "B",
        "token_ids": "i",
        "finishes": "B",
        "named_stops": "i",
        "closed": "q",
    },
    m.StopHit: {"request_ids": "q", "attempts": "i"},
    m.Started: {"prompt_ids": "i"},
    m.Text: {"token_ids": "i"},
    m.Tokenized: {"token_ids": "i"},
    m.DetokenizeQuery: {"token_ids": "i"},
    s.NewRow: {"token_ids": "i"},
    s.StepPlan: {
        "freed": "i",
        "blocks": "i",
        "copies": "i",
        "slots": "i",
        "starts": "i",
        "counts": "i",
        "samples": "B",
        "drafts": "B",
        "swaps_out": "i",
        "swaps_in": "i",
    },
    s.TokenLogprobs: {"token_ids": "i", "logprobs": "f"},
    s.PromptLogprobs: {"ranks": "i", "token_ids": "i", "logprobs": "f"},
    s.StepResult: {"token_ids": "i", "num_tokens": "B", "num_drafts": "B", "failed": "i"},
    k.Store: {"blocks": "i", "places": "i"},
    k.Fetch: {"positions": "i", "host_blocks": "i"},
    k.SearchResult: {"counts": "i"},
    k.KvTierRequests: {"drops": "i"},
    k.KvTierResults: {"fetched": "i", "missed": "i"},
    k.StoredBlocks: {"places": "i"},
}
"""Struct, field, and the `array` type code of its numbers."""

ID_BYTES, REQUEST_BYTES = 4, 8
"""Bytes per number in columns of token ids, slots, lengths; and of request ids."""


def all_below(column: bytes, limit: int) -> bool:
    """Return True when every int32 of a column is at least 0 and less than ``limit`` (1 … 2^31).

    It compares one byte of every number at a time, the highest first. Valid columns almost always pass at that byte,
    in a quarter of the time of reading all numbers.
    """
    if not column:
        return True
    top = (limit.bit_length() - 1) // 8
    for plane in range(3, top, -1):
        if column[plane::4].strip(b"\0"):
            return False
    if not column[top::4].translate(None, _BELOW[limit >> 8 * top]):
        return True
    return max(memoryview(column).cast("I")) < limit


def are_spans(starts: bytes, counts: bytes, limit: int) -> bool:
    """Return True when in each row of two int32 columns 0 <= start, 1 <= count, and start + count < ``limit``.

    The columns are treated as two long integers. Sums of 31-bit digits do not carry. Subtracting 1 from each
    non-negative digit makes the lowest digit that is 0 negative.
    """
    count = len(starts) // 4
    signs = _in_every_row(1 << 31, count)
    begin, extent = int.from_bytes(starts, "little"), int.from_bytes(counts, "little")
    if (begin | extent) & signs or (extent - _in_every_row(1, count)) & ~extent & signs:
        return False
    return all_below((begin + extent).to_bytes(len(starts), "little"), limit)


@functools.lru_cache(maxsize=1 << 13)
def _in_every_row(digit: int, count: int) -> int:
    """Return the long integer with this 32-bit digit ``count`` times."""
    return int.from_bytes(digit.to_bytes(4, "little") * count, "little")


_BELOW = [bytes(range(end)) for end in range(257)]
"""All bytes less than ``end``."""


def is_byte_column(column: bytes, num_rows: int, most: int) -> bool:
    """Return True for an optional uint8 column: empty, or ``num_rows`` values up to ``most``."""
    return not column or (len(column) == num_rows and max(column) <= most)
