"""Expert load balancer: the leader reads expert loads periodically and makes all ranks copy busy experts.

Results do not depend on it. Each layer's check and each copied chunk is one idle task between two steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import numpy as np

from quintet.executor.backends.cpu.ops.host_experts import NO_EXPERT
from quintet.executor.distributed.parallel.expert_copies import ExpertCopies
from quintet.executor.distributed.parallel.placement import Spares, copies_between, homes_of, placed
from quintet.wire.config import EplbConfig

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
