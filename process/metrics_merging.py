"""Merging of the metrics of one slot over the restarts of its process."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.wire.metrics import CounterSeries, GaugeSeries, HistogramSeries, Labels, Metrics, Snapshot


def supervised(cpu_ns: int, restarts: int) -> Metrics:
    """Return the supervisor's metrics of a process."""
    metrics = Metrics()
    metrics.counter("process_cpu_seconds", "CPU time used.").inc(cpu_ns * 1e-9)
    metrics.counter("process_restarts", "Restarts of the slot.").inc(restarts)
    return metrics


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Merge snapshots of one slot: counters and histograms are added by name and labels, gauges are the newest."""
    counters: dict[tuple[str, Labels], CounterSeries] = {}
    gauges: dict[tuple[str, Labels], GaugeSeries] = {}
    histograms: dict[tuple[str, Labels], HistogramSeries] = {}
    for snapshot in snapshots:
        for counter in snapshot.counters:
            key = (counter.name, counter.labels)
            counters[key] = add_counters(counters[key], counter) if key in counters else counter
        for histogram in snapshot.histograms:
            key = (histogram.name, histogram.labels)
            histograms[key] = add_histograms(histograms[key], histogram) if key in histograms else histogram
        gauges |= {(gauge.name, gauge.labels): gauge for gauge in snapshot.gauges}
    return Snapshot([*counters.values()], [*gauges.values()], [*histograms.values()])


def add_counters(a: CounterSeries, b: CounterSeries) -> CounterSeries:
    """Return the sum of two counters of one name."""
    return CounterSeries(a.name, a.help, a.labels, a.value + b.value)


def add_histograms(a: HistogramSeries, b: HistogramSeries) -> HistogramSeries:
    """Add two histograms; if the bounds differ, keep the common ones, so that no count is guessed."""
    bounds = tuple(sorted(set(a.bounds) & set(b.bounds)))
    counts = [x + y for x, y in zip(_rebucketed(a, bounds), _rebucketed(b, bounds), strict=True)]
    return HistogramSeries(a.name, a.help, a.labels, bounds, counts, a.total + b.total)


def _rebucketed(series: HistogramSeries, bounds: tuple[float, ...]) -> list[int]:
    """Return the counts over ``bounds``, a subset of the series' bounds."""
    counts = [0] * (len(bounds) + 1)
    at = 0
    for bound, count in zip((*series.bounds, float("inf")), series.counts, strict=True):
        while at < len(bounds) and bound > bounds[at]:
            at += 1
        counts[at] += count
    return counts
