"""Expert load balancer: the leader reads expert loads periodically and makes all ranks copy busy experts.

Results do not depend on it. Each layer's check and each copied chunk is one idle task between two steps. All ranks
execute the same order:

    source: chunk of the expert ──▶ shared memory ── barrier ──▶ target: its slot

A slot is empty from the first chunk and serves from the last one, on every rank: all ranks know the slots' contents
(`HostExperts.copies`). The original expert stays on its rank, so an interrupted copy loses nothing.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.host_experts import NO_EXPERT, HostExperts
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.placement import Copy, Spares, copies_between, homes_of, placed
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.wire.config import EplbConfig

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


READS_PER_WINDOW = 4
"""Number of load readings per averaging window."""

log = logging.getLogger(__name__)


class Balancer:
    """The load balancer of the leader of a stage."""

    def __init__(self, copies: ExpertCopies, config: EplbConfig) -> None:
        self._copies = copies
        self._interval = config.step_interval
        self._read_every = max(1, min(config.window_size // READS_PER_WINDOW, config.step_interval))
        self._kept = math.exp(-self._read_every / config.window_size)
        """Decay factor of a load between two readings."""
        self._loads = [np.zeros(len(layer.asked) - 2) for layer in copies.layers]
        self._read = [np.zeros(len(layer.asked) - 2, np.int64) for layer in copies.layers]
        """Work counters of each layer's experts at the last reading."""
        self._num_steps = 0
        self._tasks: Iterator[str] | None = None
        self.num_copies = self.bytes_moved = 0

    def note_step(self) -> None:
        """Count a step at its start."""
        self._num_steps += 1
        if self._num_steps % self._read_every == 0:
            self._read_loads()
        if self._num_steps % self._interval == 0 and self._tasks is None:
            self._tasks = self._look_at_all()

    @property
    def has_idle_tasks(self) -> bool:
        """True if layers or chunks are left to process. Any thread may read it."""
        return self._tasks is not None

    def run_idle_task(self) -> None:
        """Check one layer or copy one chunk of an expert; do nothing if none is left."""
        if self._tasks is not None and next(self._tasks, None) is None:
            self._tasks = None

    def _read_loads(self) -> None:
        for index, layer in enumerate(self._copies.layers):
            work = layer.asked[:-2]
            self._loads[index] = self._kept * self._loads[index] + (work - self._read[index])
            self._read[index] = work.copy()

    def _look_at_all(self) -> Iterator[str]:
        before = self.num_copies
        for index, layer in enumerate(self._copies.layers):
            homes = homes_of(len(self._loads[index]), layer.homes.ranks)
            now = _spares_of(layer.copies)
            new = placed(self._loads[index].tolist(), homes, now)
            yield "looked"
            for copy in copies_between(now, new, homes):
                for chunk in self._copies.chunks_of(index, copy):
                    self._copies.send(chunk)
                    self.bytes_moved += chunk.end - chunk.begin
                    yield "copied"
                self.num_copies += 1
        log.debug("copied %d experts to other ranks to balance load", self.num_copies - before)


def _spares_of(copies: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Spares:
    return tuple(
        tuple(None if expert == NO_EXPERT else expert for expert in places) for places in copies.tolist()
    )
