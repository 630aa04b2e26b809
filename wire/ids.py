"""Roles and ids of processes, and the layout of request ids."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

MAX_ID = 1 << 63
Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID - 1)]
"""A request or a query. msgspec checks the range of such types when it decodes a message."""
SlotIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 10)]
"""Index of a process within its role: a frontend's has ten bits in a request id."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A number of tokens, attempts or seconds: sent as int32 elsewhere."""
RequestId = NewType("RequestId", int)
"""63 bits: ``frontend index | frontend epoch | counter``; unique for the life of a deployment."""

_INDEX_BITS, _EPOCH_BITS, _COUNTER_BITS = 10, 13, 40


class Role(StrEnum):
    """Kinds of process."""

    SUPERVISOR = "supervisor"
    FRONTEND = "frontend"
    TOKENIZER = "tokenizer"
    CORE = "core"
    EXECUTOR = "executor"
    DETOKENIZER = "detokenizer"


class WorkerId(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """One process: its role, its index within the role, and its epoch, the number of starts of this slot."""

    role: Role
    index: SlotIndex
    epoch: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}.{self.epoch}"


class RequestIds:
    """Allocates the request ids of one frontend process."""

    def __init__(self, index: int, epoch: int) -> None:
        if not 0 <= index < 1 << _INDEX_BITS:
            raise ValueError(f"frontend index {index} does not fit in {_INDEX_BITS} bits")
        self._base = (index << _EPOCH_BITS | epoch % (1 << _EPOCH_BITS)) << _COUNTER_BITS
        self._next = 1

    def take(self, count: int = 1) -> RequestId:
        """Reserve ``count`` consecutive ids and return the first."""
        first = self._next
        self._next += count
        return RequestId(self._base | first)


def frontend_of(request_id: int) -> tuple[int, int]:
    """Return ``(index, epoch)`` of the frontend that issued this id (the epoch modulo 8192)."""
    slot = request_id >> _COUNTER_BITS
    return slot >> _EPOCH_BITS, slot & ((1 << _EPOCH_BITS) - 1)


def epoch_tag(epoch: int) -> int:
    """Return the part of an epoch that request ids carry."""
    return epoch % (1 << _EPOCH_BITS)


def is_newer(tag: int, epoch: int) -> bool:
    """Return True when this is the tag of an epoch after ``epoch``. Tags wrap: less than half the range ahead is after."""
    return 0 < epoch_tag(tag - epoch) < 1 << (_EPOCH_BITS - 1)
