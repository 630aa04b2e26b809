"""Counters, gauges and histograms of a process, and the snapshot sent with its heartbeat.

``frontend/metrics.py`` formats them for Prometheus. Counting is cheap enough for once per step or request.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

Labels = tuple[tuple[str, str], ...]

TIME_BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Seconds. Fine at the low end for hops and decode steps."""

PACE_BUCKETS_S = tuple(sorted({*TIME_BUCKETS_S, 0.15, 0.25, 0.3, 0.35, 0.4}))
"""Seconds between tokens: finer around the step time target on a CPU, which autoscaling uses."""

COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens, rows."""


class CounterSeries(msgspec.Struct, array_like=True):
    """A value that only grows."""

    name: str
    help: str
    labels: Labels
    value: float = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class GaugeSeries(msgspec.Struct, array_like=True):
    """A current value."""

    name: str
    help: str
    labels: Labels
    value: float = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)


class HistogramSeries(msgspec.Struct, array_like=True):
    """Counts of values per bucket; ``counts`` has one more entry than ``bounds``, for values above the last bound."""

    name: str
    help: str
    labels: Labels
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Snapshot(msgspec.Struct, array_like=True):
    """All series of one process."""

    counters: list[CounterSeries]
    gauges: list[GaugeSeries]
    histograms: list[HistogramSeries]


class Metrics:
    """Registry of one process. Create each series once at start and keep it; names carry no prefix."""

    def __init__(self) -> None:
        self._snapshot = Snapshot([], [], [])

    def counter(self, name: str, help: str, **labels: str) -> CounterSeries:
        """Declare a counter; Prometheus shows it as ``quintet:<name>_total``."""
        series = CounterSeries(name, help, tuple(labels.items()))
        self._snapshot.counters.append(series)
        return series

    def gauge(self, name: str, help: str, **labels: str) -> GaugeSeries:
        series = GaugeSeries(name, help, tuple(labels.items()))
        self._snapshot.gauges.append(series)
        return series

    def histogram(
        self, name: str, help: str, bounds: tuple[float, ...] = TIME_BUCKETS_S, **labels: str
    ) -> HistogramSeries:
        """Declare a histogram over ``bounds`` (upper, inclusive)."""
        series = HistogramSeries(name, help, tuple(labels.items()), bounds, [0] * (len(bounds) + 1))
        self._snapshot.histograms.append(series)
        return series

    def encoded(self) -> bytes:
        """Return the snapshot as bytes for `Heartbeat`."""
        return encode_snapshot(self._snapshot)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Encode a snapshot for `decode_snapshot`."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(encoded: bytes) -> Snapshot:
    """Decode a snapshot; empty bytes are an empty snapshot."""
    if not encoded:
        return Snapshot([], [], [])
    return msgspec.msgpack.decode(encoded, type=Snapshot)
