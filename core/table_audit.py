"""Checksum of block tables, for the check of the executor's tables: a debug check, `SchedulerConfig.audit`."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from quintet.core.kv.groups import Groups
from quintet.core.requests.request import Request
from quintet.wire.codec import pack_i32, pack_i64


def table_checksum(rows: Iterable[tuple[Request, int, int, int]], groups: Groups) -> int:
    """Return the CRC-32 of the block tables that a step reads. rows: request, generation, start and end of each.

    It covers the rows in order: slot and generation (int64), then per group the blocks (int32) that the row reads and
    writes (`quintet.wire.kv_spec.KvGroup.used`).
    """
    checksum = 0
    for request, generation, start, end in rows:
        checksum = crc32(pack_i64((request.slot, generation)), checksum)
        for group, held in zip(groups.all, request.kv.held, strict=True):
            if group.is_state:
                blocks = [held.blocks[0], held.blocks[-1]]
            else:
                used = group.used(start, end, groups.spec.block_size)
                blocks = held.blocks[used.start - held.begin : used.stop - held.begin]
            checksum = crc32(pack_i32(blocks), checksum)
    return checksum
