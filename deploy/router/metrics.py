"""Prometheus metrics of the router, and parsing of the servers' metrics."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quintet.deploy.router.servers import Server, Servers
from quintet.frontend.metrics import Series, add_samples, family_of
from quintet.wire.metrics import Metrics, decode_snapshot

_LINE = re.compile(
    r"\nvllm:(num_requests_running|num_requests_waiting|prompt_tokens_total|generation_tokens_total"
    r"|kv_cache_usage_perc|request_generation_tokens_sum|request_generation_tokens_count)(?:\{[^}]*\})? (\S+)"
)
"""Begins with a literal prefix instead of ``^`` for fast search: a thousand servers are parsed every second."""
_CACHE = re.compile(r"\nvllm:cache_config_info\{([^}]*)\}")
_SIZE = re.compile(r'\b(num_gpu_blocks|block_size)="(\d{1,12})"')
_ROLE = re.compile(r'\nquintet:kv_peers_info\{[^}]*\bduty="(\w{1,16})"')
_WORK = frozenset({"prompt_tokens_total", "generation_tokens_total"})
STATUSES = frozenset(HTTPStatus)
"""Known status codes; others are counted as ``other``."""


MOST = 1e15
"""Upper bound of valid values; larger ones count as 0."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Metrics of a server, summed over its engines. The names are common to vLLM and Quintet."""

    num_running: int
    num_waiting: int
    num_tokens: float
    """Prompt and output tokens computed so far."""
    kv_tokens: int
    """Capacity of the KV memory in tokens; 0 if unknown."""
    role: str = ""
    """Role in prefill-decode disaggregation; "" for none."""
    kv_usage: float = 0.0
    """Used share of the KV memory; 0 if unknown."""
    num_outputs: int = 0
    """Average output tokens per request; 0 if unknown."""


def parse_metrics(text: str) -> ServerMetrics:
    """Parse the `/metrics` text of a server. Missing or invalid values are 0."""
    sums: defaultdict[str, float] = defaultdict(float)
    usages: list[float] = []
    text = f"\n{text}"
    for name, raw in _LINE.findall(text):
        value = _number(raw)
        if name == "kv_cache_usage_perc":
            usages.append(value if value <= 1 else 0.0)
        sums["tokens" if name in _WORK else name] += value
    running, waiting = int(sums["num_requests_running"]), int(sums["num_requests_waiting"])
    num_ended = sums["request_generation_tokens_count"]
    num_outputs = int(sums["request_generation_tokens_sum"] / num_ended) if num_ended >= 1 else 0
    role = _ROLE.search(text)
    kv_tokens = sum(map(_kv_tokens, _CACHE.findall(text)))
    kv_usage = sum(usages) / len(usages) if usages else 0.0
    duty = role[1] if role is not None else ""
    return ServerMetrics(running, waiting, sums["tokens"], kv_tokens, duty, kv_usage, num_outputs)


def _kv_tokens(labels: str) -> int:
    """Return the capacity of one engine's KV memory in tokens, from the labels of a series."""
    sizes = {name: int(value) for name, value in _SIZE.findall(labels)}
    return sizes.get("num_gpu_blocks", 0) * sizes.get("block_size", 0)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < MOST else 0.0


class RouterMetrics(Collector):
    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._metrics = Metrics()
        self._own: Counter[str] = Counter()
        """Answers by the router itself, by status."""
        self.first_byte = self._metrics.histogram(
            "time_to_first_byte_seconds", "Time from a request's arrival to the first byte of its answer."
        )
        self.retries = self._metrics.counter(
            "retries", "Requests sent to another server before the first byte of an answer."
        )
        self.hedges = self._metrics.counter(
            "hedges", "Second attempts of requests that were slow to start (--hedge-after)."
        )
        self.resumptions = self._metrics.counter(
            "resumptions", "Streams resumed on another server or another connection."
        )
        self.broken = self._metrics.counter(
            "broken_streams", "Streams that ended with an error because no server could resume them."
        )
        self.prefills = {
            is_computed: self._metrics.counter(
                "apart",
                "Requests with disaggregated prefill, by success (computed) or failure.",
                computed=str(is_computed).lower(),
            )
            for is_computed in (False, True)
        }
        self.held_bodies = self._metrics.gauge(
            "held_body_bytes", "Bytes of request bodies in memory, received or being received."
        )
        self.limited = self._metrics.counter(
            "limited_requests", "Requests rejected by the limit of their key."
        )

    def answered(self, server: Server | None, status: int) -> None:
        """Count an answer of a server, or of the router for None. A server's counts are dropped with the server."""
        counts = self._own if server is None else server.answers
        counts[str(status) if status in STATUSES else "other"] += 1

    def collect(self) -> Iterable[Metric]:
        """Return all metric families: counters, and gauges per server."""
        now = Metrics()
        for server in self._servers:
            labels = {"server": server.url}
            now.gauge("server_up", "1 if the server gets requests.", **labels).set(not server.trouble)
            now.gauge("server_open_requests", "Open requests of this router.", **labels).set(server.num_open)
            now.gauge("server_queued_tokens", "Queued prompt tokens of this router.", **labels).set(
                server.num_queued
            )
            now.gauge("server_other_requests", "Requests of other clients.", **labels).set(server.num_others)
        for url, counts in [("", self._own), *((server.url, server.answers) for server in self._servers)]:
            for status, num in counts.items():
                of = {"server": url, "status": status}
                now.counter("requests", "Answers, by server and status.", **of).inc(num)
        families: dict[str, Metric] = {}
        for metrics in (self._metrics, now):
            snapshot = decode_snapshot(metrics.encoded())
            all_series: list[Series] = [*snapshot.counters, *snapshot.gauges, *snapshot.histograms]
            for series in all_series:
                add_samples(family_of(families, f"quintet_route:{series.name}", series), series, ())
        return families.values()

    def text(self) -> bytes:
        return generate_latest(self)
