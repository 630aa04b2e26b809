"""Copy experts between ranks, one piece between two steps; all ranks execute the same order.

    source: piece of the expert ──▶ shared memory ── barrier ──▶ target: its slot

A slot is empty from the first piece and serves from the last one, on every rank: all ranks know the slots' contents
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

_PIECE = struct.Struct("8q")


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

    def tell(self, piece: CopyChunk) -> None:
        """On the leader: copy a piece, and make the followers do the same."""
        self._ranks.tell_mail(OrderKind.MOVE_EXPERT, _PIECE.pack(*piece), _PIECE.size)
        self._move(piece)

    def move_told(self, mail: bytes) -> None:
        """On a follower: execute the leader's order."""
        self._move(CopyChunk(*_PIECE.unpack(mail)))

    def pieces_of(self, layer: int, copy: Copy) -> Iterator[CopyChunk]:
        """Split a copy into pieces that fit the staging buffer."""
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
    """Yield the piece's overlap with each part, and its offset in the piece."""
    at = 0
    for part in parts:
        begin, end = max(piece.begin, at), min(piece.end, at + part.numel())
        if begin < end:
            yield part[begin - at : end - at], begin - piece.begin
        at += part.numel()
