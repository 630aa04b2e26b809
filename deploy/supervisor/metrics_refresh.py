"""Metrics queries of frontends: request fresh metrics from all processes, with a short timeout for slow ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quintet.deploy.supervisor.process_slots import SlotTable
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import MetricsQuery, ReportMetrics

REPORT_TIMEOUT_S = 0.05


@dataclass(slots=True)
class _PendingQuery:
    query: MetricsQuery
    awaited: set[WorkerId]
    until: float


class MetricsRefresh:
    """Pending metrics queries and the processes that each waits for."""

    def __init__(self, slots: SlotTable, send: Callable[[Role, int, msgspec.Struct], bool]) -> None:
        self._slots = slots
        self._send = send
        self._waiting: list[_PendingQuery] = []

    def ask(self, query: MetricsQuery, now: float) -> None:
        """Request metrics from all processes. The query does not wait for executors: a step may take seconds."""
        awaited: set[WorkerId] = set()
        for slot in self._slots.own():
            if slot.process is not None and slot.ready_at is not None and slot.worker != query.asker:
                self._send(slot.role, slot.index, ReportMetrics())
                if slot.role is not Role.EXECUTOR:
                    awaited.add(slot.worker)
        self._waiting.append(_PendingQuery(query, awaited, now + REPORT_TIMEOUT_S))

    def record_heartbeat(self, worker: WorkerId) -> None:
        for pending in self._waiting:
            pending.awaited.discard(worker)

    def take(self, now: float) -> list[MetricsQuery]:
        """Remove and return the queries that are complete or timed out."""
        due = [pending.query for pending in self._waiting if not pending.awaited or pending.until <= now]
        if due:
            self._waiting = [pending for pending in self._waiting if pending.awaited and pending.until > now]
        return due

    def remaining_s(self, now: float) -> float | None:
        """Return the seconds until the next timeout; None without pending queries."""
        return max(0.0, min(pending.until for pending in self._waiting) - now) if self._waiting else None
