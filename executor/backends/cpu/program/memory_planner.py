"""Fusion of operations, and memory assignment of values by lifetime.

Two values share memory if their lifetimes do not overlap. A linear layer adds a residual itself, and writes the sum over the
residual if no later operation reads it. A layer also applies the activation that follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from quintet.executor.backends.cpu.program.values import Extent, Operation, Value
from quintet.executor.memory import lazy_zeros

_LINE_BYTES = 64
"""Size of a cache line. A row of an even number of lines is padded by one line. Kernels read many rows at once, and a
power-of-two stride maps them to few cache sets."""


class Lifetimes:
    """Producer and readers of each value, as operation indices. A fused operation is None and is skipped."""

    def __init__(self, operations: Sequence[Operation | None]) -> None:
        self._producers: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        for number, operation in enumerate(operations):
            if operation is not None:
                self.note(number, operation)

    def note(self, number: int, operation: Operation) -> None:
        """Record an operation."""
        self._producers[id(operation.writes)] = number
        for value in operation.reads:
            self._reads.setdefault(id(value.owner), []).append(number)

    def forget(self, number: int, operation: Operation) -> None:
        """Remove an operation."""
        del self._producers[id(operation.writes)]
        for value in operation.reads:
            self._reads[id(value.owner)].remove(number)

    def producer(self, value: Value) -> int | None:
        """Return the operation that writes the value; None for an input of the pass."""
        return self._producers.get(id(value.owner))

    def reads(self, value: Value) -> list[int]:
        """Return the operations that read the value or a view of it, once per read."""
        return self._reads.get(id(value.owner), [])

    def last(self, value: Value) -> int | None:
        """Return the last operation that reads the value, or its producer if none does."""
        return max(self.reads(value), default=self.producer(value))


def fuse(
    operations: Sequence[Operation], kept: Collection[int], borders: Collection[int]
) -> list[Operation | None]:
    """Fuse sums and activations into the layers that compute their inputs; a fused operation becomes None.

    kept: ids of values that are read after the pass. borders: indices of operations that begin a separately run part.
    """
    fused: list[Operation | None] = list(operations)
    lifetimes = Lifetimes(operations)
    for number, operation in enumerate(operations):
        for term, other, code in _terms(operation):
            producer = lifetimes.producer(term)
            layer = None if producer is None else fused[producer]
            if (
                producer is None
                or layer is None
                or layer.emit_with is None
                or any(producer < border <= number for border in borders)
            ):
                continue
            if term.viewed is not None or id(term) in kept or lifetimes.reads(term) != [number]:
                continue  # another operation reads the unfused result
            total = operation.writes
            at = (
                producer
                if other is None
                else _fused_index(number, total, layer, producer, other, lifetimes, kept)
            )
            if at is None:
                continue
            lifetimes.forget(number, operation)
            lifetimes.forget(producer, layer)
            others = () if other is None else (other,)
            whole = replace(
                layer,
                emit=partial(layer.emit_with, total, other, code),
                emit_with=None,
                reads=(*layer.reads, *others),
                writes=total,
                over=others,
            )
            fused[number] = fused[producer] = None
            fused[at] = whole
            lifetimes.note(at, whole)
            break
    return fused


def _terms(operation: Operation) -> list[tuple[Value, Value | None, int]]:
    """Return the candidates of fusion: the layer's result, the value added to it, the activation code."""
    if operation.sums is not None:
        x, y = operation.sums
        return [(y, x, 0), (x, y, 0)]
    if operation.activates is not None:
        x, code = operation.activates
        return [(x, None, code)]
    return []


def _fused_index(
    number: int,
    total: Value,
    layer: Operation,
    producer: int,
    other: Value,
    lifetimes: Lifetimes,
    kept: Collection[int],
) -> int | None:
    """Return the index at which ``layer`` can run with the addition of ``other`` fused, or None.

    producer: index of ``layer``. number: index of the addition, which writes ``total``. None: ``other`` and the sum would need
    different memory layouts.
    """
    if other.viewed is not None or id(other) in kept:
        return None
    other_producer = lifetimes.producer(other)
    is_ready = other_producer is None or other_producer < producer
    others = [read for read in lifetimes.reads(other) if read != number]
    is_multiplied = any(value.owner is other for value in layer.reads)
    if (
        all(read < number for read in others) and not is_multiplied
    ):  # no later reader: overwrite it with the sum
        return producer if is_ready and all(read < producer for read in others) else number
    if id(total) in kept:
        return None
    return producer if is_ready else number


class MemoryPlanner:
    """Assigns memory to values and asserts that no operation reads an overwritten value."""

    def __init__(
        self, dtype: torch.dtype, max_rows: dict[Extent, int], kept: Collection[int], lifetimes: Lifetimes
    ) -> None:
        """kept: ids of values with memory that is never reused."""
        self._dtype = dtype
        self._max_rows = max_rows
        self._kept = kept
        self._lifetimes = lifetimes
        self._free: dict[Extent, list[torch.Tensor]] = {extent: [] for extent in Extent}
        self._holds: dict[int, Value] = {}
        self.memory: list[torch.Tensor] = []
        """All allocated tensors."""

    def assign(self, number: int, operation: Operation) -> None:
        """Assign memory to the result of operation ``number``; free the memory of values that it reads last."""
        result = operation.writes
        owners = {id(value.owner): value.owner for value in operation.reads}.values()
        for owner in owners:
            assert self._holds.get(owner.address, owner) is owner, (
                f"operation {number}, {operation.name!r}, reads an overwritten value"
            )
        over = None
        if result.place is None:  # otherwise its memory is shared with other ranks
            over = next(
                (value for value in operation.over if self._is_reusable(number, operation, value)), None
            )
            result.place = self._place(result) if over is None else over.place
        self._holds[result.address] = result
        for owner in owners:
            if owner is not over and id(owner) not in self._kept and self._lifetimes.last(owner) == number:
                self._free[owner.extent].append(owner.tensor)

    def _is_reusable(self, number: int, operation: Operation, value: Value) -> bool:
        """Return whether the result may overwrite ``value``: same shape and dtype, read once and for the last time."""
        result = operation.writes
        return (
            value.viewed is None
            and (value.width, value.extent, value.dtype) == (result.width, result.extent, result.dtype)
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
        padding = 0
        if value.width * dtype.itemsize % (2 * _LINE_BYTES) == 0 and id(value) not in self._kept:
            padding = _LINE_BYTES // dtype.itemsize
        shape = (self._max_rows[value.extent], value.width + padding)
        self.memory.append(lazy_zeros(shape, dtype, torch.device("cpu"))[:, : value.width])
        return self.memory[-1]
