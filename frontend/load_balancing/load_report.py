"""Server load in response headers for external load balancers (ORCA; same headers as vLLM and Triton).

A request with ``endpoint-load-metrics-format: TEXT`` or ``JSON`` gets the header ``endpoint-load-metrics``.
"""

from __future__ import annotations

import json
import time

from quintet.frontend.http.http_request import Header
from quintet.frontend.metrics import collect
from quintet.frontend.service import Service
from quintet.wire.errors import RequestError
from quintet.wire.ids import Role
from quintet.wire.metrics import GaugeSeries

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = b"endpoint-load-metrics"
MAX_AGE_S = 0.2
"""Cache lifetime: each read asks all processes."""
MAX_WAIT_S = 0.5
"""Timeout of the supervisor; on timeout the header is omitted."""
GAUGES = ("kv_cache_usage_perc", "num_requests_waiting")
"""The first is the maximum over engines, the second the sum."""


class LoadReport:
    """Cached load metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._gauges: dict[str, float] = {}
        self._read_s = float("-inf")

    async def headers(self, format_name: str) -> list[Header]:
        """Return the header in the requested format; empty for another format or without metrics."""
        kind = format_name.strip().upper()
        if kind not in {"TEXT", "JSON"}:
            return []
        if time.monotonic() - self._read_s > MAX_AGE_S:
            try:
                self._gauges = await self._read()
            except RequestError:
                return []
            self._read_s = time.monotonic()
        if kind == "JSON":
            values = json.dumps({"named_metrics": self._gauges})
        else:
            values = ", ".join(f"named_metrics.{name}={value}" for name, value in self._gauges.items())
        return [(LOAD_HEADER, f"{kind} {values}".encode())]

    async def _read(self) -> dict[str, float]:
        report = await self._service.queries.metrics(MAX_WAIT_S, self._service.metrics.encoded())
        found: dict[str, list[float]] = {name: [] for name in GAUGES}
        for source in collect(report):
            for series in source.snapshot.gauges if source.role is Role.CORE else ():
                if series.name in found:
                    found[series.name].append(_value(series))
        usage, waiting = (found[name] for name in GAUGES)
        return dict(zip(GAUGES, (max(usage, default=0.0), sum(waiting, start=0.0)), strict=True))


def _value(series: GaugeSeries) -> float:
    return float(series.value)
