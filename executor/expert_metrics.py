"""What is told of experts: how unevenly they are asked for, and how evenly ranks share the work. Counted by the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quintet.wire.metrics import Metrics

LOOK_EVERY = 128
"""Steps."""


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Of a process's layers that have experts; numbers that only grow."""

    asked: Sequence[NDArray[np.int64]]
    """Of each layer; see `quintet.executor.backends.cpu.ops.host_experts.HostExperts`."""
    ranks: int
    """Who share the work."""
    copied: Callable[[], tuple[int, int]]
    """Experts that were copied to other ranks, and bytes that were moved for it."""


class ExpertFigures:
    """The metrics of an executor whose model has experts."""

    def __init__(self, metrics: Metrics, counts: ExpertCounts) -> None:
        self._counts = counts
        self._num_steps = 0
        self._seen = [asked.copy() for asked in counts.asked]
        self._hottest = [
            metrics.gauge(
                "executor_expert_hottest",
                "Work of the expert that was asked for most, over the mean of its layer's, lately.",
                layer=str(layer),
            )
            for layer in range(len(counts.asked))
        ]
        self._busiest = metrics.gauge(
            "executor_experts_busiest_rank",
            "Work of whichever rank had most in each layer and step, over the mean of all ranks, lately.",
        )
        self._copies = metrics.counter("executor_expert_copies", "Experts copied to other ranks.")
        self._bytes = metrics.counter("executor_expert_copied_bytes", "Weights moved for it.")

    def note_step(self) -> None:
        """Count a step; look at what was asked now and then."""
        copies, moved = self._counts.copied()
        self._copies.value, self._bytes.value = float(copies), float(moved)
        self._num_steps += 1
        if self._num_steps % LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        busiest = everybody = 0
        for gauge, seen, asked in zip(self._hottest, self._seen, self._counts.asked, strict=True):
            lately = asked - seen
            seen[:] = asked
            of_experts = lately[:-2]
            busiest, everybody = busiest + int(lately[-2]), everybody + int(lately[-1])
            gauge.set(float(of_experts.max()) / max(float(of_experts.mean()), 1e-9))
        self._busiest.set(busiest * self._counts.ranks / max(everybody, 1))
