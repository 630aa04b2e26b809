"""From operations on values to operations on memory: which ones are one, and where each value lies.

Two values share memory when one is no longer needed before the other is made. What is added to the result of a linear layer
is added by the layer itself, and the sum is written over it if nobody reads it later; so is an activation behind one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from quintet.executor.backends.cpu.program.values import Extent, Operation, Value
from quintet.executor.memory import lazy_zeros

_LINE_BYTES = 64
"""Of a cache. An empty line follows each row of an even number of lines: kernels read many rows side by side, and the more
factors of two their distance has, the fewer sets of a cache do their lines share."""


class Lifetimes:
    """Which operation makes each value and which ones read it, by their numbers. Operations may be None: left out."""

    def __init__(self, operations: Sequence[Operation | None]) -> None:
        self._made: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        for number, operation in enumerate(operations):
            if operation is not None:
                self.note(number, operation)

    def note(self, number: int, operation: Operation) -> None:
        """Note an operation."""
        self._made[id(operation.writes)] = number
        for value in operation.reads:
            self._reads.setdefault(id(value.owner), []).append(number)

    def forget(self, number: int, operation: Operation) -> None:
        """Forget it again."""
        del self._made[id(operation.writes)]
        for value in operation.reads:
            self._reads[id(value.owner)].remove(number)

    def made(self, value: Value) -> int | None:
        """Return who makes it; None: it was there before."""
        return self._made.get(id(value.owner))

    def reads(self, value: Value) -> list[int]:
        """Return who reads it or a view of it, as often as it does."""
        return self._reads.get(id(value.owner), [])

    def last(self, value: Value) -> int | None:
        """Return who reads it last, or who makes it if nobody does."""
        return max(self.reads(value), default=self.made(value))


def fuse(
    operations: Sequence[Operation], kept: Collection[int], borders: Collection[int]
) -> list[Operation | None]:
    """Return the operations with sums and activations made by the layers whose results they take; what is left out is None.

    kept: ids of values that are read after the pass. borders: numbers of operations before which a part of the program ends that
    is run by itself.
    """
    fused: list[Operation | None] = list(operations)
    lifetimes = Lifetimes(operations)
    for number, operation in enumerate(operations):
        for term, other, code in _terms(operation):
            made = lifetimes.made(term)
            layer = None if made is None else fused[made]
            if (
                made is None
                or layer is None
                or layer.emit_with is None
                or any(made < border <= number for border in borders)
            ):
                continue
            if term.viewed is not None or id(term) in kept or lifetimes.reads(term) != [number]:
                continue  # somebody else wants the result as it is
            total = operation.writes
            where = made if other is None else _where(number, total, layer, made, other, lifetimes, kept)
            if where is None:
                continue
            lifetimes.forget(number, operation)
            lifetimes.forget(made, layer)
            others = () if other is None else (other,)
            whole = replace(
                layer,
                emit=partial(layer.emit_with, total, other, code),
                emit_with=None,
                reads=(*layer.reads, *others),
                writes=total,
                over=others,
            )
            fused[number] = fused[made] = None
            fused[where] = whole
            lifetimes.note(where, whole)
            break
    return fused


def _terms(operation: Operation) -> list[tuple[Value, Value | None, int]]:
    """Return which results an operation could be a part of, each with what is added to it and the activation that follows."""
    if operation.sums is not None:
        x, y = operation.sums
        return [(y, x, 0), (x, y, 0)]
    if operation.activates is not None:
        x, code = operation.activates
        return [(x, None, code)]
    return []


def _where(
    number: int,
    total: Value,
    layer: Operation,
    made: int,
    other: Value,
    lifetimes: Lifetimes,
    kept: Collection[int],
) -> int | None:
    """Return when a layer, operation ``made``, can add its result to ``other`` itself, as ``number`` does, which makes ``total``.

    None where it cannot: what it is added to does not lie as the sum will.
    """
    if other.viewed is not None or id(other) in kept:
        return None
    maker = lifetimes.made(other)
    is_there = maker is None or maker < made
    others = [read for read in lifetimes.reads(other) if read != number]
    is_multiplied = any(value.owner is other for value in layer.reads)
    if (
        all(read < number for read in others) and not is_multiplied
    ):  # nobody reads it later: the sum is written over it
        return made if is_there and all(read < made for read in others) else number
    if id(total) in kept:
        return None
    return made if is_there else number


class MemoryPlanner:
    """Gives values memory, and sees to it that nobody reads what is not there any more."""

    def __init__(
        self, dtype: torch.dtype, max_rows: dict[Extent, int], kept: Collection[int], lifetimes: Lifetimes
    ) -> None:
        """kept: ids of values whose memory no other value may get."""
        self._dtype = dtype
        self._max_rows = max_rows
        self._kept = kept
        self._lifetimes = lifetimes
        self._free: dict[Extent, list[torch.Tensor]] = {extent: [] for extent in Extent}
        self._holds: dict[int, Value] = {}
        self.memory: list[torch.Tensor] = []
        """All that was given."""

    def give(self, number: int, operation: Operation) -> None:
        """Give the result of operation ``number`` its memory; take back that of what is read for the last time."""
        made = operation.writes
        owners = {id(value.owner): value.owner for value in operation.reads}.values()
        for owner in owners:
            assert self._holds.get(owner.address, owner) is owner, (
                f"operation {number}, {operation.name!r}, reads what another value was written over"
            )
        over = None
        if made.place is None:  # else its memory is somebody else's
            over = next((value for value in operation.over if self._may_go(number, operation, value)), None)
            made.place = self._place(made) if over is None else over.place
        self._holds[made.address] = made
        for owner in owners:
            if owner is not over and id(owner) not in self._kept and self._lifetimes.last(owner) == number:
                self._free[owner.extent].append(owner.tensor)

    def _may_go(self, number: int, operation: Operation, value: Value) -> bool:
        """Whether the result may be written over ``value``: it is as large, and read for the last time and once."""
        made = operation.writes
        return (
            value.viewed is None
            and (value.width, value.extent, value.dtype) == (made.width, made.extent, made.dtype)
            and id(value) not in self._kept
            and self._lifetimes.last(value) == number
            and sum(read.owner is value for read in operation.reads) == 1
        )

    def _place(self, value: Value) -> torch.Tensor:
        candidates, dtype = self._free[value.extent], value.dtype or self._dtype
        for i, tensor in enumerate(candidates):
            is_alike = tensor.shape[1] == value.width and tensor.dtype is dtype
            if is_alike and (tensor.is_contiguous() or id(value) not in self._kept):
                return candidates.pop(i)
        between = 0
        if value.width * dtype.itemsize % (2 * _LINE_BYTES) == 0 and id(value) not in self._kept:
            between = _LINE_BYTES // dtype.itemsize
        shape = (self._max_rows[value.extent], value.width + between)
        self.memory.append(lazy_zeros(shape, dtype, torch.device("cpu"))[:, : value.width])
        return self.memory[-1]
