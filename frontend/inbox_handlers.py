"""Message handlers of one frontend: its live requests and RPC calls.

Shared by the HTTP frontend and the Python API, so that both recover from lost messages and workers in the same way. Has no
HTTP, sockets or clocks: the owner of the event loop passes messages and calls `InboxHandlers.send_reports` periodically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quintet.frontend.live_requests import LiveRequests
from quintet.frontend.load_balancing.dispatcher import Send
from quintet.frontend.rpc import Rpc
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_admin import KvReport
from quintet.wire.messages import Detokenized, Failed, Resumed, Text, Tokenized, Unknown
from quintet.wire.metrics import Metrics
from quintet.wire.pooling import Pooled
from quintet.wire.supervision import MetricsReport, Topology

FrontendInbox = Text | Failed | Pooled | Tokenized | Detokenized | Resumed | Unknown | KvReport
"""Inbox messages of a frontend, in addition to those of every process."""

REPORT_INTERVAL_S = 5.0
"""Seconds between two reconciliation reports."""


class InboxHandlers:
    """Live requests and RPC calls of one frontend."""

    def __init__(
        self,
        me: WorkerId,
        send: Send,
        config: EngineConfig,
        metrics: Metrics | None = None,
        span: TraceSpan = no_span,
    ) -> None:
        self._send = send
        self.requests = LiveRequests(me, send, config, metrics, span)
        self.queries = Rpc(me, send, self.requests.ledger)
        answer = self.queries.handle
        self.by_type: dict[type[msgspec.Struct], Callable[[Any], None]] = {
            Text: self.requests.apply_text,
            Failed: self.requests.apply_failed,
            Pooled: self.requests.apply_pooled,
            Unknown: self.requests.resume_unknown,
            Topology: self.follow,
            Dropped: self._fail_dropped,
            Tokenized: answer,
            Detokenized: answer,
            Resumed: answer,
            KvReport: answer,
            MetricsReport: answer,
        }
        """The handler of each message type. The owner adds those of messages for itself."""

    def handle(self, message: msgspec.Struct) -> None:
        """Apply one message from another process. The runtime has connected the addresses of a `Topology` before."""
        self.by_type[type(message)](message)

    def follow(self, topology: Topology) -> None:
        """Apply a topology: requests and queries of lost workers are sent again."""
        self.requests.follow(topology)
        self.queries.follow()

    def _fail_dropped(self, dropped: Dropped) -> None:
        error = dropped.error(Role.FRONTEND)
        self.requests.give_up(dropped.request_ids, error)
        if dropped.query_id is not None:
            self.queries.fail(dropped.query_id, error)

    def send_reports(self) -> None:
        """Send the reconciliation reports. Call every `REPORT_INTERVAL_S`."""
        for role, index, report in self.requests.in_flight_reports():
            self._send(role, index, report)
