"""State shared by the endpoints of one frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from quintet.frontend.admission import Admission
from quintet.frontend.http.bodies import MAX_OPEN_BYTES, BodyBuffers
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.http.stream_timers import WriteTimeout
from quintet.frontend.inbox_handlers import InboxHandlers
from quintet.frontend.load_balancing.dispatcher import Send
from quintet.frontend.response_store import ResponseStore
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.metrics import CounterSeries, Metrics
from quintet.wire.supervision import Drain, Drained, Topology


class HttpMetrics:
    """HTTP request counts and write times."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests: dict[tuple[str, str, int], CounterSeries] = {}
        self.write_seconds = metrics.histogram(
            "stream_write_seconds", "Time to hand the events of one step to the socket."
        )

    def answered(self, route: str, method: str, status: int) -> None:
        """Count a response. ``route`` is a path pattern, never a client's path."""
        key = (route, method, status)
        series = self._requests.get(key)
        if series is None:
            series = self._requests[key] = self._metrics.counter(
                "http_requests", "HTTP responses.", route=route, method=method, status=str(status)
            )
        series.inc()


class Service:
    """One frontend: live requests, RPC, admission and metrics, and the messages for them."""

    def __init__(
        self, me: WorkerId, send: Send, config: EngineConfig, metrics: Metrics, span: TraceSpan = no_span
    ) -> None:
        self.me = me
        self.config = config
        self.metrics = metrics
        self.span = span
        self.inbox = InboxHandlers(me, send, config, metrics, span)
        self.inbox.by_type |= {Topology: self._follow, Drain: self._drain}
        self.requests, self.queries = self.inbox.requests, self.inbox.queries
        self.admission = Admission(self.requests.ledger, config.frontend, metrics)
        self.write_timeout = WriteTimeout(config.frontend.write_timeout_s, lambda: self.draining)
        max_bytes = config.frontend.max_body_bytes
        self.bodies = BodyBuffers(max_bytes, max_open_bytes=max(max_bytes, MAX_OPEN_BYTES))
        self.http = HttpMetrics(metrics)
        self.started_at = int(time.time())
        self.num_exchanges = 0
        """HTTP requests being answered, plus background responses."""
        self.responses = ResponseStore(config)
        self.background: dict[str, asyncio.Task[None]] = {}
        """Background tasks by id: responses without a waiting client, and the search for lost ones."""
        self.on_topology: Callable[[], None] = lambda: None
        """Called after every new topology."""
        self.is_retiring = False
        """True if this frontend is being replaced: it accepts no connection and serves open ones until they close."""
        self.is_cut_off = False
        """True if no client can reach this frontend any more."""
        self._send = send
        self._reported_drained = False

    @property
    def draining(self) -> bool:
        """True if new requests are rejected."""
        return self.admission.draining

    def handle(self, message: msgspec.Struct) -> None:
        """Apply one message from another process."""
        self.inbox.by_type[type(message)](message)
        self.check_drained()

    def _follow(self, topology: Topology) -> None:
        self.inbox.follow(topology)
        self.on_topology()

    def _drain(self, _: Drain) -> None:
        if self.requests.workers.topology.draining:
            self.admission.draining = True
        else:
            self.is_retiring = True

    def check_drained(self) -> None:
        """Report `Drained` to the supervisor, once, after the last request when no other can arrive."""
        if self._reported_drained or not (self.draining or self.is_cut_off):
            return
        if self.num_exchanges == 0 and self.requests.num_live == 0:
            self._reported_drained = True
            self._send(Role.SUPERVISOR, 0, Drained(self.me))


Handler = Callable[[Service, HttpRequest], Awaitable[None]]
"""Endpoint handler: answers one HTTP request, or raises `RequestError`."""
