"""What the router counts, as Prometheus text, and what it reads of the figures of servers."""

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
"""It begins with what it can be looked for by, not with ``^``: a thousand servers are read every second."""
_CACHE = re.compile(r"\nvllm:cache_config_info\{([^}]*)\}")
_SIZE = re.compile(r'\b(num_gpu_blocks|block_size)="(\d{1,12})"')
_ROLE = re.compile(r'\nquintet:kv_peers_info\{[^}]*\bduty="(\w{1,16})"')
_WORK = frozenset({"prompt_tokens_total", "generation_tokens_total"})
STATUSES = frozenset(HTTPStatus)
"""A server may answer with any other number: those are counted as one."""


MOST = 1e15
"""No figure is as large: what says so is no number that can be."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """A server's figures, under the names that vLLM and Quintet share, of all its engines together."""

    num_running: int
    num_waiting: int
    num_tokens: float
    """Computed so far, of prompts and outputs."""
    kv_tokens: int
    """That its KV memory holds; 0 where it does not tell."""
    role: str = ""
    """What it does of requests that two servers compute; "" for nothing."""
    kv_usage: float = 0.0
    """Share of its KV memory that requests take; 0 where it does not tell."""
    num_outputs: int = 0
    """What answers have had so far, on average; 0 where it does not tell."""


def read_figures(text: str) -> ServerMetrics:
    """Read `/metrics` of a server; what it does not tell, or not as a number, is nothing."""
    sums: defaultdict[str, float] = defaultdict(float)
    usages: list[float] = []
    text = f"\n{text}"
    for name, told in _LINE.findall(text):
        value = _number(told)
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
    """Return the tokens that one engine's KV memory holds, told by the labels of a series."""
    sizes = {name: int(value) for name, value in _SIZE.findall(labels)}
    return sizes.get("num_gpu_blocks", 0) * sizes.get("block_size", 0)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < MOST else 0.0


class RouterMetrics(Collector):
    """The router's own."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._metrics = Metrics()
        self._own: Counter[str] = Counter()
        """The router's own answers, by status."""
        self.first_byte = self._metrics.histogram(
            "time_to_first_byte_seconds", "From a request's arrival to the first of its answer."
        )
        self.retries = self._metrics.counter(
            "retries", "Requests sent to another server before anything of an answer had come."
        )
        self.hedges = self._metrics.counter(
            "hedges", "Second copies of requests that were slow to begin (--hedge-after)."
        )
        self.resumptions = self._metrics.counter(
            "resumptions", "Streams that another server, or another connection, went on with."
        )
        self.broken = self._metrics.counter(
            "broken_streams", "Streams that ended because nobody could go on with them."
        )
        help = "Requests whose prompt another server than answers was to compute, by whether it did."
        self._apart = {
            is_computed: self._metrics.counter("apart", help, computed=str(is_computed).lower())
            for is_computed in (False, True)
        }
        self.held_bodies = self._metrics.gauge(
            "held_body_bytes", "Of request bodies: those that come, and those of requests that are open."
        )
        self.limited = self._metrics.counter(
            "limited_requests", "Requests refused by the limit of their key."
        )

    def apart(self, *, is_computed: bool) -> None:
        """Count a request whose prompt another server was to compute."""
        self._apart[is_computed].inc()

    def answered(self, server: Server | None, status: int) -> None:
        """Count an answer of a server, which takes its counts along when it leaves; of the router's own for None."""
        counts = self._own if server is None else server.answers
        counts[str(status) if status in STATUSES else "other"] += 1

    def collect(self) -> Iterable[Metric]:
        """Return all families: what was counted, and how each server is."""
        now = Metrics()
        for server in self._servers:
            now.gauge("server_up", "Whether it gets requests.", server=server.url).set(not server.trouble)
            now.gauge("server_open_requests", "Requests of ours there.", server=server.url).set(
                server.num_open
            )
            now.gauge("server_queued_tokens", "Prompt tokens of ours not begun.", server=server.url).set(
                server.num_queued
            )
            now.gauge("server_other_requests", "Requests of others there.", server=server.url).set(
                server.num_others
            )
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
        """Return them as Prometheus reads them."""
        return generate_latest(self)
