"""Copying experts from rank to rank, a piece between two steps: all ranks carry out the same order.

    source: piece of the expert ──▶ shared memory ── meet ──▶ target: its place

A place is empty from the first piece on and serves from the last one on, at every rank alike: every rank knows who has what
(`HostExperts.copies`). An expert stays where it is at home, so nothing is ever lost, whoever dies in the middle.
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

_PIECE = struct.Struct("8q")


class CopyChunk(NamedTuple):
    """Bytes ``[begin, end)`` of an expert's ``size``, from the rank ``source`` to a place of the rank ``target``."""

    layer: int
    """Which of the layers that have experts."""
    expert: int
    source: int
    target: int
    place: int
    begin: int
    end: int
    size: int


class ExpertCopies:
    """One rank's: of all layers of its stage that have experts."""

    def __init__(self, layers: Sequence[HostExperts], ranks: Ranks) -> None:
        self.layers = layers
        self._ranks = ranks

    def tell(self, piece: CopyChunk) -> None:
        """Rank 0: move a piece, and have the others do so."""
        self._ranks.tell_mail(OrderKind.MOVE_EXPERT, _PIECE.pack(*piece), _PIECE.size)
        self._move(piece)

    def move_told(self, mail: bytes) -> None:
        """Another rank: do what rank 0 does."""
        self._move(CopyChunk(*_PIECE.unpack(mail)))

    def pieces_of(self, layer: int, copy: Copy) -> Iterator[CopyChunk]:
        """Cut a copy into pieces for which there is room."""
        size = sum(part.numel() for part in self.layers[layer].bytes_at(0))
        most = self._ranks.shape.staging_bytes
        for begin in range(0, size, most):
            end = min(begin + most, size)
            yield CopyChunk(layer, copy.expert, copy.source, copy.target, copy.place, begin, end, size)

    def _move(self, piece: CopyChunk) -> None:
        layer, rank = self.layers[piece.layer], self._ranks.share.rank
        if piece.begin == 0:
            layer.copies[piece.target, piece.place] = NO_EXPERT
        staging = self._ranks.staging()
        if rank == piece.source:
            for part, place in _within(layer.bytes_at(piece.expert - layer.first), piece):
                staging[place : place + part.numel()] = part
        self._ranks.meet()
        if rank == piece.target:
            for part, place in _within(layer.bytes_at(layer.kept + piece.place), piece):
                part.copy_(staging[place : place + part.numel()])
        if piece.end == piece.size:
            layer.copies[piece.target, piece.place] = piece.expert


def _within(parts: Sequence[torch.Tensor], piece: CopyChunk) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield what the piece has of each part, and where in the piece that begins."""
    at = 0
    for part in parts:
        begin, end = max(piece.begin, at), min(piece.end, at + part.numel())
        if begin < end:
            yield part[begin - at : end - at], begin - piece.begin
        at += part.numel()
