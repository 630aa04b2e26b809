"""Where packed weights lie: a section of one large piece of memory for each layer that is packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.backends.cpu.ops.huge_pages import HugePages

SECTION_ALIGNMENT = 4096
"""Sections begin on pages, in memory as in a file that is mapped."""

Description = Mapping[str, str | int | bool]


class PackedStore(Protocol):
    """A layer whose packed weight needs memory."""

    @property
    def num_bytes(self) -> int:
        """How much."""

    @property
    def description(self) -> Description:
        """What the bytes mean, in full: equal descriptions, equal meaning. JSON."""

    def open(self, memory: torch.Tensor) -> None:
        """Use this memory (uint8, 64-byte aligned), which stays: zeros to be packed into, or what was packed before."""


def offsets(stores: Iterable[PackedStore], begin: int = 0) -> tuple[list[int], int]:
    """Return where each section begins, the first no earlier than ``begin``, and where the last one ends."""
    begins, end = [], begin
    for store in stores:
        end = -(-end // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        begins.append(end)
        end += store.num_bytes
    return begins, end


def reserve(stores: Iterable[PackedStore], ahead: HugeMemory | None = None) -> HugePages | None:
    """Open every store in memory of its own, taken from one reservation; return that, None where there are no stores.

    ahead: what may be that, if it is large enough; what is not used of it is given back.
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
