"""Copy experts between ranks, one chunk between two steps; all ranks execute the same order.

    source: chunk of the expert ──▶ shared memory ── barrier ──▶ target: its slot

A slot is empty from the first chunk and serves from the last one, on every rank: all ranks know the slots' contents
(`HostExperts.copies`). The original expert stays on its rank, so an interrupted copy loses nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from quintet.executor.backends.cpu.ops.host_experts import NO_EXPERT, HostExperts
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.placement import Copy
from quintet.executor.distributed.parallel.ranks import Ranks

_CHUNK = struct.Struct("8q")


class CopyChunk(NamedTuple):
    """Bytes ``[begin, end)`` of an expert's ``size``, copied from rank ``source`` to a slot of rank ``target``."""

    layer: int
    """Index among the layers with experts."""
    expert: int
    source: int
    target: int
    place: int
    begin: int
    end: int
    size: int


class ExpertCopies:
    """One rank's side of copies, for all layers with experts of its stage."""

    def __init__(self, layers: Sequence[HostExperts], ranks: Ranks) -> None:
        self.layers = layers
        self._ranks = ranks

    def send(self, chunk: CopyChunk) -> None:
        """On the leader: copy a chunk, and make the followers do the same."""
        self._ranks.send_items(OrderKind.MOVE_EXPERT, _CHUNK.pack(*chunk), _CHUNK.size)
        self._move(chunk)

    def move_ordered(self, items: bytes) -> None:
        """On a follower: execute the leader's order."""
        self._move(CopyChunk(*_CHUNK.unpack(items)))

    def chunks_of(self, layer: int, copy: Copy) -> Iterator[CopyChunk]:
        """Split a copy into chunks that fit the staging buffer."""
        size = sum(part.numel() for part in self.layers[layer].bytes_at(0))
        most = self._ranks.shape.staging_bytes
        for begin in range(0, size, most):
            end = min(begin + most, size)
            yield CopyChunk(layer, copy.expert, copy.source, copy.target, copy.place, begin, end, size)

    def _move(self, chunk: CopyChunk) -> None:
        layer, rank = self.layers[chunk.layer], self._ranks.share.rank
        if chunk.begin == 0:
            layer.copies[chunk.target, chunk.place] = NO_EXPERT
        staging = self._ranks.staging()
        if rank == chunk.source:
            for part, place in _within(layer.bytes_at(chunk.expert - layer.first), chunk):
                staging[place : place + part.numel()] = part
        self._ranks.barrier()
        if rank == chunk.target:
            for part, place in _within(layer.bytes_at(layer.kept + chunk.place), chunk):
                part.copy_(staging[place : place + part.numel()])
        if chunk.end == chunk.size:
            layer.copies[chunk.target, chunk.place] = chunk.expert


def _within(parts: Sequence[torch.Tensor], chunk: CopyChunk) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the chunk's overlap with each part, and its offset in the chunk."""
    at = 0
    for part in parts:
        begin, end = max(chunk.begin, at), min(chunk.end, at + part.numel())
        if begin < end:
            yield part[begin - at : end - at], begin - chunk.begin
        at += part.numel()
