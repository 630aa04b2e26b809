"""Memory of packed weights: one section for each packed layer in a single reservation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.backends.cpu.ops.huge_pages import HugePages

SECTION_ALIGNMENT = 4096
"""Sections are page-aligned, in memory and in the cache file."""

Description = Mapping[str, str | int | bool]


class PackedStore(Protocol):
    """A layer with a packed weight that needs memory."""

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight."""

    @property
    def description(self) -> Description:
        """Complete description of the bytes: equal descriptions mean equal content. JSON."""

    def open(self, memory: torch.Tensor) -> None:
        """Use this memory (uint8, 64-byte aligned, never moved): zeros to be packed into, or cached packed bytes."""


def offsets(stores: Iterable[PackedStore], begin: int = 0) -> tuple[list[int], int]:
    """Return the begin of each section, the first at or after ``begin``, and the end of the last one."""
    begins, end = [], begin
    for store in stores:
        end = -(-end // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        begins.append(end)
        end += store.num_bytes
    return begins, end


def reserve(stores: Iterable[PackedStore], ahead: HugeMemory | None = None) -> HugePages | None:
    """Open every store in one new reservation and return it; None without stores.

    ahead: early reservation, used if it is large enough; the unused part is released.
    """
    stores = list(stores)
    begins, end = offsets(stores)
    if ahead is not None:
        is_enough = 0 < end <= ahead.length
        ahead.shrink(end if is_enough else 0)
        ahead = ahead if is_enough else None
    if not end:
        return None
    reservation = HugePages(end, ahead)
    for store, begin in zip(stores, begins, strict=True):
        store.open(reservation.memory[begin : begin + store.num_bytes])
    return reservation
