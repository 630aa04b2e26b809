"""GET /metrics: metrics of all processes in Prometheus text format.

Each series appears as ``quintet:<name>`` with labels ``role`` and ``index``. Series that vLLM has too also appear as
``vllm:<name>``, summed per engine, so that existing dashboards and scalers work. A counter continues from the slot's
former processes, and remains when a slot is retired: it never decreases while the server lives.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quintet.frontend.http.http_request import Header, HttpRequest
from quintet.frontend.service import Service
from quintet.process.metrics_merging import add_counters, add_histograms, merged, supervised
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.metrics import (
    CounterSeries,
    GaugeSeries,
    HistogramSeries,
    Labels,
    Snapshot,
    decode_snapshot,
)
from quintet.wire.supervision import MetricsReport, ProcessMetrics, SlotState

MAX_WAIT_S = 5.0
"""Timeout of the supervisor: half of Prometheus's default. On failure the graph has a gap; a partial answer would look like
a counter reset."""

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
    spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos
    """.split()  # noqa: SIM905 - thirty names read better as words than as literals
)
"""Series that also appear with vLLM's prefix."""

ENGINE_ROLES = frozenset({Role.CORE, Role.EXECUTOR})

MAX_GAUGES = frozenset({"kv_cache_usage_perc", "cache_config_info"})
"""Gauges aggregated over processes by maximum, not by sum."""

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = b"endpoint-load-metrics"
LOAD_AGE_S = 0.2
"""Cache lifetime: each read asks all processes."""
LOAD_WAIT_S = 0.5
"""Timeout of the supervisor; on timeout the header is omitted."""

Series = CounterSeries | GaugeSeries | HistogramSeries


@dataclass(frozen=True, slots=True)
class SlotMetrics:
    """Metrics of one slot."""

    role: Role
    index: int
    snapshot: Snapshot

    def series(self) -> Iterator[Series]:
        yield from self.snapshot.counters
        yield from self.snapshot.gauges
        yield from self.snapshot.histograms


async def metrics(service: Service, http_request: HttpRequest) -> None:
    """Answer with the metrics that the supervisor has of all processes; 503 on timeout.

    This process's own metrics are shown only after the supervisor stored them. Else they would be lost with the process,
    and a counter would decrease.
    """
    try:
        report = await service.queries.metrics(MAX_WAIT_S, service.metrics.encoded())
    except RequestError as error:
        raise RequestError(ErrorCode.UNAVAILABLE, error.message) from None
    text = generate_latest(MetricsPage(collect(report), service.config.model.served_names[0]))
    await http_request.respond(200, text, CONTENT_TYPE)


def collect(report: MetricsReport) -> list[SlotMetrics]:
    """Return the metrics of every slot: its process's, added to those of former processes.

    Slots are sorted: a float sum depends on the order, and a sum that is less by one bit looks like a counter reset.
    """
    parts: dict[tuple[Role, int], list[Snapshot]] = defaultdict(list)
    for past in report.past:
        parts[past.role, past.index].append(decode_snapshot(past.metrics))
    for process in report.processes:
        slot = parts[process.worker.role, process.worker.index]
        slot += [decode_snapshot(process.metrics), _supervised(process)]
    return [SlotMetrics(role, index, merged(parts[role, index])) for role, index in sorted(parts)]


def _supervised(process: ProcessMetrics) -> Snapshot:
    """Return the supervisor's metrics of a process."""
    metrics = supervised(process.cpu_ns, process.restarts)
    metrics.gauge("process_up", "Whether the process is ready.").set(process.state is SlotState.READY)
    metrics.gauge("process_pending", "Work accepted and not completed.").set(process.pending)
    return decode_snapshot(metrics.encoded())


class MetricsPage(Collector):
    """All sources as Prometheus metric families."""

    def __init__(self, sources: Sequence[SlotMetrics], model_name: str) -> None:
        self._sources = sources
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Return the families, Quintet's first, then vLLM's."""
        ours: dict[str, Metric] = {}
        merged_series: dict[tuple[str, Labels, int], Series] = {}
        for source in self._sources:
            labels = (
                ("model_name", self._model_name),
                ("role", str(source.role)),
                ("index", str(source.index)),
            )
            engine = source.index if source.role in ENGINE_ROLES else 0  # shared roles count for engine 0
            for series in source.series():
                add_samples(family_of(ours, f"quintet:{series.name}", series), series, labels)
                if series.name in VLLM_NAMES:
                    key = (series.name, series.labels, engine)
                    known = merged_series.get(key)
                    merged_series[key] = series if known is None else merge(known, series)
        aliases: dict[str, Metric] = {}
        for (_, _, engine), series in merged_series.items():
            engine_labels = (("model_name", self._model_name), ("engine", str(engine)))
            add_samples(family_of(aliases, f"vllm:{series.name}", series), series, engine_labels)
        return [*ours.values(), *aliases.values()]


def merge(a: Series, b: Series) -> Series:
    """Return the sum of two processes' series of one name."""
    if isinstance(a, HistogramSeries) and isinstance(b, HistogramSeries):
        return add_histograms(a, b)
    if isinstance(a, GaugeSeries) and isinstance(b, GaugeSeries):
        value = max(a.value, b.value) if a.name in MAX_GAUGES else a.value + b.value
        return GaugeSeries(a.name, a.help, a.labels, value)
    assert isinstance(a, CounterSeries) and isinstance(b, CounterSeries), f"{a.name} has two kinds"
    return add_counters(a, b)


def family_of(families: dict[str, Metric], name: str, series: Series) -> Metric:
    """Return the family of this name; create it on first use."""
    family = families.get(name)
    if family is None:
        kind = {CounterSeries: "counter", GaugeSeries: "gauge", HistogramSeries: "histogram"}[type(series)]
        family = families[name] = Metric(name, series.help, kind)
    return family


def add_samples(family: Metric, series: Series, labels: Labels) -> None:
    """Add a series' samples to its family; its own labels override ``labels``."""
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


class LoadReport:
    """Cached load metrics in response headers for external load balancers (ORCA; same headers as vLLM and Triton).

    A request with ``endpoint-load-metrics-format: TEXT`` or ``JSON`` gets the header ``endpoint-load-metrics``.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._gauges: dict[str, float] = {}
        self._read_s = float("-inf")
        self._reading: asyncio.Task[bool] | None = None
        """Read in progress, shared by the requests that need it."""

    async def headers(self, format_name: str) -> list[Header]:
        """Return the header in the requested format; empty for another format or without metrics."""
        kind = format_name.strip().upper()
        if kind not in {"TEXT", "JSON"}:
            return []
        if time.monotonic() - self._read_s > LOAD_AGE_S:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self._refresh())
            if not await asyncio.shield(self._reading):
                return []
        if kind == "JSON":
            values = json.dumps({"named_metrics": self._gauges})
        else:
            values = ", ".join(f"named_metrics.{name}={value}" for name, value in self._gauges.items())
        return [(LOAD_HEADER, f"{kind} {values}".encode())]

    async def _refresh(self) -> bool:
        """Read the load; return whether the supervisor answered."""
        try:
            report = await self._service.queries.metrics(LOAD_WAIT_S, self._service.metrics.encoded())
        except RequestError:
            return False
        usage, waiting = 0.0, 0.0
        for source in collect(report):
            for gauge in source.snapshot.gauges if source.role is Role.CORE else ():
                if gauge.name == "kv_cache_usage_perc":
                    usage = max(usage, gauge.value)
                elif gauge.name == "num_requests_waiting":
                    waiting += gauge.value
        self._gauges = {"kv_cache_usage_perc": usage, "num_requests_waiting": waiting}
        self._read_s = time.monotonic()
        return True
