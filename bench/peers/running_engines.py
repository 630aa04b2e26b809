"""Start engines when they are first needed; stop them for another setup, or when memory is short.

All engines of a setup run at once, so that measurements alternate without restarts; only the measured one is busy. When memory is
short, the least recently used engine is stopped.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import psutil

from bench.peers.engines.interface import Contender, Home, Running, Setup
from bench.peers.workload import Row


class RunningEngines:
    """The running engines of one setup."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._setup: Setup | None = None
        self._running: dict[str, Running] = {}
        """Least recently used first."""
        self._warm: dict[str, str] = {}
        """Row of the last warm-up, by engine."""

    def get(self, engine: Contender, setup: Setup) -> Running | None:
        """Return the engine if it runs with this setup."""
        running = self._running.pop(engine.name, None) if setup == self._setup else None
        if running is not None:
            self._running[engine.name] = running
        return running

    def start(self, engine: Contender, setup: Setup) -> Running:
        """Start an engine; stop the least recently used ones first if memory is short."""
        if setup != self._setup:
            self.stop_all()
            self._setup = setup
        while self._running and psutil.virtual_memory().available < engine.memory_bytes(setup):
            self.stop(next(iter(self._running)))
        running = engine.start(self._home, setup)
        self._running[engine.name] = running
        return running

    def needs_warm_up(self, engine: Contender, row: Row) -> bool:
        """Return True if the engine has not been warmed up for this row; record that it is now."""
        needs = self._warm.get(engine.name) != row.id
        self._warm[engine.name] = row.id
        return needs

    def stop(self, name: str) -> None:
        """Stop one engine if it runs."""
        self._warm.pop(name, None)
        running = self._running.pop(name, None)
        if running is not None:
            running.stop()

    def stop_all(self) -> None:
        """Stop every engine."""
        for name in list(self._running):
            self.stop(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()
