"""Frontends that show everybody's figures: nobody is told what is a second old, and nobody waits for who is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quintet.deploy.supervisor.process_slots import SlotTable
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import MetricsQuery, ReportMetrics

PATIENCE_S = 0.05


@dataclass(slots=True)
class _Looker:
    query: MetricsQuery
    awaited: set[WorkerId]
    until: float


class MetricsRefresh:
    """Who waits for the newest figures, and for whose."""

    def __init__(self, slots: SlotTable, send: Callable[[Role, int, msgspec.Struct], bool]) -> None:
        self._slots = slots
        self._send = send
        self._waiting: list[_Looker] = []

    def ask(self, query: MetricsQuery, now: float) -> None:
        """Have everybody tell their figures. The executor is not waited for: it may compute for seconds."""
        awaited: set[WorkerId] = set()
        for slot in self._slots.own():
            if slot.process is not None and slot.ready_at is not None and slot.worker != query.asker:
                self._send(slot.role, slot.index, ReportMetrics())
                if slot.role is not Role.EXECUTOR:
                    awaited.add(slot.worker)
        self._waiting.append(_Looker(query, awaited, now + PATIENCE_S))

    def heard(self, worker: WorkerId) -> None:
        """Note a heartbeat."""
        for looker in self._waiting:
            looker.awaited.discard(worker)

    def take(self, now: float) -> list[MetricsQuery]:
        """Return, once, the questions that can be answered, or have waited long enough."""
        due = [looker.query for looker in self._waiting if not looker.awaited or looker.until <= now]
        if due:
            self._waiting = [each for each in self._waiting if each.awaited and each.until > now]
        return due

    def patience_s(self, now: float) -> float | None:
        """Return how long the first of them still waits; None while nobody does."""
        return max(0.0, min(looker.until for looker in self._waiting) - now) if self._waiting else None
