"""Standby processes: booted in advance without a slot, so that one replaces a dead process of its role at once.

Booting a tokenizer or detokenizer reads a large vocabulary, which takes seconds on a loaded machine. A standby process
has booted and waits on its standard input for its slot (`quintet.process.runtime`).
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence

from quintet.deploy.supervisor.spawn import Spawner, assign_slot
from quintet.wire.ids import Role, WorkerId

STANDBY_ROLES = (Role.TOKENIZER, Role.DETOKENIZER)
PAUSE_S = 1.5
"""Delay of the next standby process after one was used, so that the replacement gets the processor first."""
FIRST_PAUSE_S = 3.0
"""Delay after the server is ready, so that first requests get the processor first."""
MAX_LOSSES = 3
"""Unused standby processes of a role that may die before no more are started."""


class StandbyProcesses:
    """One standby process for each of ``roles``."""

    def __init__(self, spawner: Spawner, roles: Sequence[Role]) -> None:
        self._spawner = spawner
        self._waiting: dict[Role, subprocess.Popen[bytes]] = {}
        self._roles = roles
        self._started = False
        self._due: dict[Role, float] = {}
        """Start time of the next standby process, for each role without one."""
        self._losses = dict.fromkeys(roles, 0)
        self._log = logging.getLogger("quintet")

    def replenish(self, now: float) -> None:
        """Start missing standby processes that are due, and count dead ones."""
        if not self._started:
            self._started = True
            self._due = dict.fromkeys(self._roles, now + FIRST_PAUSE_S)
        for role, process in list(self._waiting.items()):
            if process.poll() is not None:
                del self._waiting[role]
                self._losses[role] += 1
                self._log.warning("standby %s exited with status %s", role, process.returncode)
                if self._losses[role] < MAX_LOSSES:
                    self._due[role] = now + PAUSE_S
        for role, due in list(self._due.items()):
            if now >= due:
                del self._due[role]
                self._waiting[role] = self._spawner.spawn_standby(role)

    def take(self, worker: WorkerId, now: float) -> subprocess.Popen[bytes] | None:
        """Assign ``worker``'s slot to the standby process of its role and return it; None without one."""
        process = self._waiting.get(worker.role)
        if process is None or process.poll() is not None:
            return None
        del self._waiting[worker.role]
        self._due[worker.role] = now + PAUSE_S
        return process if assign_slot(process, worker) else None

    def end(self) -> None:
        """Kill the standby processes, and start no more."""
        for process in self._waiting.values():
            process.kill()
        for process in self._waiting.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._waiting.clear()
        self._due.clear()
        self._started = True
