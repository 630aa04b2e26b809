"""Message handlers of one frontend: its sessions and RPC calls.

Shared by the HTTP frontend and the Python API, so that both recover from lost messages and workers in the same way. Has no
HTTP, sockets or clocks: the owner of the event loop passes messages and calls `InboxHandlers.send_reports` periodically.
"""

from __future__ import annotations

from quintet.frontend.load_balancing.dispatcher import Send
from quintet.frontend.rpc import Rpc
from quintet.frontend.sessions import Sessions
from quintet.wire.codec import unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_admin import KvReport
from quintet.wire.messages import Detokenized, Failed, Reclaimed, Text, Tokenized, Unknown
from quintet.wire.metrics import Metrics
from quintet.wire.supervision import MetricsReport, Topology

FrontendInbox = Text | Failed | Tokenized | Detokenized | Reclaimed | Unknown | KvReport
"""Inbox messages of a frontend, in addition to those of every process."""

Inbound = FrontendInbox | Topology | MetricsReport | Dropped

REPORT_INTERVAL_S = 5.0
"""Seconds between two reconciliation reports."""


class InboxHandlers:
    """Sessions and RPC calls of one frontend."""

    def __init__(
        self, me: WorkerId, send: Send, config: EngineConfig, metrics: Metrics | None = None
    ) -> None:
        self._send = send
        self.sessions = Sessions(me, send, config, metrics)
        self.queries = Rpc(me, send, self.sessions.slots)

    def handle(self, message: Inbound) -> None:
        """Apply one message from another process. The runtime has connected the addresses of a `Topology` before."""
        match message:
            case Text() | Failed():
                self.sessions.handle(message)
            case Topology():
                self.sessions.follow(message)
                self.queries.follow()
            case Unknown():
                self.sessions.resend(unpack_i64(message.request_ids))
            case Dropped():
                error = message.error(Role.FRONTEND)
                self.sessions.give_up(message.request_ids, error)
                if message.query_id is not None:
                    self.queries.fail(message.query_id, error)
            case _:
                self.queries.handle(message)

    def send_reports(self) -> None:
        """Send the reconciliation reports. Call every `REPORT_INTERVAL_S`."""
        for role, index, report in self.sessions.in_flight_reports():
            self._send(role, index, report)
