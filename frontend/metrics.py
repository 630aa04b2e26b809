"""GET /metrics: everybody's figures as Prometheus text.

Each series appears as ``quintet:<name>`` with the process that counted it (``role``, ``index``), and, where vLLM has
a metric of that name, as ``vllm:<name>`` summed over processes, so that existing dashboards and scalers work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quintet.frontend.exchange import Exchange
from quintet.frontend.service import Service
from quintet.wire.errors import RequestError
from quintet.wire.ids import WorkerId
from quintet.wire.metrics import (
    CounterSeries,
    GaugeSeries,
    HistogramSeries,
    Labels,
    Metrics,
    Snapshot,
    decode_snapshot,
)
from quintet.wire.supervision import ProcessFigures, SeatState

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

VLLM_NAMES = frozenset(
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
    cache_config_info prompt_tokens prompt_tokens_cached generation_tokens
    request_success num_preemptions prefix_cache_queries prefix_cache_hits admission_rejections
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
    request_max_num_generation_tokens request_params_n request_params_max_tokens request_num_preemptions
    request_prefill_kv_computed_tokens iteration_tokens_total
    """.split()  # noqa: SIM905 - thirty names read better as words than as literals
)
"""Series that also appear under vLLM's prefix."""

MAX_GAUGES = frozenset({"kv_cache_usage_perc", "cache_config_info"})
"""Gauges whose value over several processes is the largest, not the sum."""

Series = CounterSeries | GaugeSeries | HistogramSeries


@dataclass(frozen=True, slots=True)
class Source:
    """One process's figures."""

    worker: WorkerId
    snapshot: Snapshot

    def series(self) -> Iterator[Series]:
        """Yield every series, whatever its kind."""
        yield from self.snapshot.counters
        yield from self.snapshot.gauges
        yield from self.snapshot.histograms


async def metrics(service: Service, exchange: Exchange) -> None:
    """Answer with the figures of every process; when the supervisor is silent, with this frontend's own."""
    try:
        report = await service.queries.metrics()
        processes = report.processes
    except RequestError:
        processes = []
    sources = collect(service.me, service.metrics, processes)
    text = generate_latest(Page(sources, service.config.model.served_names[0]))
    await exchange.respond(200, text, CONTENT_TYPE)


def collect(me: WorkerId, own: Metrics, processes: Sequence[ProcessFigures]) -> list[Source]:
    """Return the figures of every process: this one's as they are now, the others' as last reported."""
    sources = [Source(me, decode_snapshot(own.encoded()))]
    for process in processes:
        if process.worker != me:
            sources.append(Source(process.worker, decode_snapshot(process.metrics)))
        sources.append(Source(process.worker, _supervised(process)))
    return sources


def _supervised(process: ProcessFigures) -> Snapshot:
    """Return what the supervisor knows of a process."""
    metrics = Metrics()
    metrics.counter("process_cpu_seconds", "Processor time used.").inc(process.cpu_ns * 1e-9)
    metrics.counter("process_restarts", "How often the seat was filled again.").inc(process.restarts)
    metrics.gauge("process_up", "Whether the process is ready.").set(process.state is SeatState.READY)
    metrics.gauge("process_pending", "Work accepted and not completed.").set(process.pending)
    return decode_snapshot(metrics.encoded())


class Page(Collector):
    """All sources as Prometheus families."""

    def __init__(self, sources: Sequence[Source], model_name: str) -> None:
        self._sources = sources
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Return the families, ours first."""
        ours: dict[str, Metric] = {}
        alias = Alias(self._model_name)
        for source in self._sources:
            labels = (
                ("model_name", self._model_name),
                ("role", str(source.worker.role)),
                ("index", str(source.worker.index)),
            )
            for series in source.series():
                add_samples(_family(ours, f"quintet:{series.name}", series), series, labels)
                if series.name in VLLM_NAMES:
                    alias.add(series)
        return [*ours.values(), *alias.families()]


@dataclass(slots=True)
class Alias:
    """vLLM's view of the same figures: one engine, all processes together."""

    model_name: str
    _merged: dict[tuple[str, Labels], Series] = field(default_factory=dict)

    def add(self, series: Series) -> None:
        """Merge one process's series into those of its name and labels."""
        key = (series.name, series.labels)
        known = self._merged.get(key)
        self._merged[key] = series if known is None else merge(known, series)

    def families(self) -> Iterable[Metric]:
        """Return the merged series as families."""
        families: dict[str, Metric] = {}
        labels = (("model_name", self.model_name), ("engine", "0"))
        for series in self._merged.values():
            add_samples(_family(families, f"vllm:{series.name}", series), series, labels)
        return families.values()


def merge(a: Series, b: Series) -> Series:
    """Return two processes' series of one name as one."""
    if isinstance(a, HistogramSeries) and isinstance(b, HistogramSeries):
        return _merge_histograms(a, b)
    if isinstance(a, GaugeSeries) and isinstance(b, GaugeSeries):
        value = max(a.value, b.value) if a.name in MAX_GAUGES else a.value + b.value
        return GaugeSeries(a.name, a.help, a.labels, value)
    assert isinstance(a, CounterSeries) and isinstance(b, CounterSeries), f"{a.name} has two kinds"
    return CounterSeries(a.name, a.help, a.labels, a.value + b.value)


def _merge_histograms(a: HistogramSeries, b: HistogramSeries) -> HistogramSeries:
    """Add histograms bucket by bucket; of bounds that differ, keep those both have, so that no count is guessed."""
    bounds = tuple(sorted(set(a.bounds) & set(b.bounds)))
    counts = [x + y for x, y in zip(_rebucketed(a, bounds), _rebucketed(b, bounds), strict=True)]
    return HistogramSeries(a.name, a.help, a.labels, bounds, counts, a.total + b.total)


def _rebucketed(series: HistogramSeries, bounds: tuple[float, ...]) -> list[int]:
    """Return the counts over ``bounds``, which are some of the series' own."""
    counts = [0] * (len(bounds) + 1)
    at = 0
    for bound, count in zip((*series.bounds, float("inf")), series.counts, strict=True):
        while at < len(bounds) and bound > bounds[at]:
            at += 1
        counts[at] += count
    return counts


def _family(families: dict[str, Metric], name: str, series: Series) -> Metric:
    family = families.get(name)
    if family is None:
        kind = {CounterSeries: "counter", GaugeSeries: "gauge", HistogramSeries: "histogram"}[type(series)]
        family = families[name] = Metric(name, series.help, kind)
    return family


def add_samples(family: Metric, series: Series, labels: Labels) -> None:
    """Add a series' samples to its family; a series' own labels win over ``labels``."""
    named = {**dict(labels), **dict(series.labels)}
    if isinstance(series, CounterSeries):
        family.add_sample(f"{family.name}_total", named, series.value)
    elif isinstance(series, GaugeSeries):
        family.add_sample(family.name, named, series.value)
    else:
        cumulative = 0
        for bound, count in zip((*series.bounds, float("inf")), series.counts, strict=True):
            cumulative += count
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            family.add_sample(f"{family.name}_bucket", {**named, "le": le}, cumulative)
        family.add_sample(f"{family.name}_count", named, cumulative)
        family.add_sample(f"{family.name}_sum", named, series.total)
