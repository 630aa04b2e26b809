"""Expert load metrics: imbalance between experts and between ranks. The kernels count the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quintet.wire.metrics import Metrics

UPDATE_EVERY = 128
"""Steps between two updates of the metrics."""


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Monotonic counters of a process's layers with experts."""

    asked: Sequence[NDArray[np.int64]]
    """Work counters of each layer; see `quintet.executor.backends.cpu.ops.host_experts.HostExperts`."""
    ranks: int
    """Number of ranks that share the work."""
    copied: Callable[[], tuple[int, int]]
    """Returns the number of experts copied to other ranks, and the bytes moved."""


class ExpertMetrics:
    """The metrics of a model with experts."""

    def __init__(self, metrics: Metrics, counts: ExpertCounts) -> None:
        self._counts = counts
        self._num_steps = 0
        self._last_work = [asked.copy() for asked in counts.asked]
        self._hottest = [
            metrics.gauge(
                "executor_expert_hottest",
                "Recent work of the busiest expert divided by the mean of its layer.",
                layer=str(layer),
            )
            for layer in range(len(counts.asked))
        ]
        self._busiest = metrics.gauge(
            "executor_experts_busiest_rank",
            "Recent work of the busiest rank of each layer and step, divided by the mean of all ranks.",
        )
        self._copies = metrics.counter("executor_expert_copies", "Experts copied to other ranks.")
        self._bytes = metrics.counter(
            "executor_expert_copied_bytes", "Bytes of weights moved to copy experts between ranks."
        )

    def note_step(self) -> None:
        """Count a step; update the metrics every `UPDATE_EVERY` steps."""
        copies, moved = self._counts.copied()
        self._copies.value, self._bytes.value = float(copies), float(moved)
        self._num_steps += 1
        if self._num_steps % UPDATE_EVERY == 0:
            self._update()

    def _update(self) -> None:
        busiest = total = 0
        for gauge, last_work, asked in zip(self._hottest, self._last_work, self._counts.asked, strict=True):
            recent = asked - last_work
            last_work[:] = asked
            of_experts = recent[:-2]
            busiest, total = busiest + int(recent[-2]), total + int(recent[-1])
            gauge.set(float(of_experts.max()) / max(float(of_experts.mean()), 1e-9))
        self._busiest.set(busiest * self._counts.ranks / max(total, 1))
