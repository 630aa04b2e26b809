"""Processes that were booted in advance, without a slot: one takes over at once when one of its role dies.

Booting a tokenizer or detokenizer means reading a large vocabulary: seconds, on a machine whose cores all compute. A
spare has that behind it, and waits at its standard input for the line that names its slot (`quintet.process.runtime`).
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence

from quintet.deploy.supervisor.spawn import Spawner, assign_slot
from quintet.wire.ids import Role, WorkerId

SPARE_ROLES = (Role.TOKENIZER, Role.DETOKENIZER)
PAUSE_S = 1.5
"""After one was taken: whoever took over comes first, then the next spare."""
FIRST_PAUSE_S = 3.0
"""After the server is ready: the first request comes before anybody's reserve."""
MAX_LOSSES = 3
"""A role whose spares die unused so often has none any more."""


class StandbyProcesses:
    """One waiting process for each of ``roles``."""

    def __init__(self, spawner: Spawner, roles: Sequence[Role]) -> None:
        self._spawner = spawner
        self._waiting: dict[Role, subprocess.Popen[bytes]] = {}
        self._roles = roles
        self._has_begun = False
        self._due: dict[Role, float] = {}
        """When the next one is started, of each role that lacks one."""
        self._losses = dict.fromkeys(roles, 0)
        self._log = logging.getLogger("quintet")

    def keep(self, now: float) -> None:
        """Start what is missing, once it is time; notice those that died."""
        if not self._has_begun:
            self._has_begun = True
            self._due = dict.fromkeys(self._roles, now + FIRST_PAUSE_S)
        for role, process in list(self._waiting.items()):
            if process.poll() is not None:
                del self._waiting[role]
                self._losses[role] += 1
                self._log.warning("the spare %s ended with exit status %s", role, process.returncode)
                if self._losses[role] < MAX_LOSSES:
                    self._due[role] = now + PAUSE_S
        for role, due in list(self._due.items()):
            if now >= due:
                del self._due[role]
                self._waiting[role] = self._spawner.spawn_spare(role)

    def take(self, worker: WorkerId, now: float) -> subprocess.Popen[bytes] | None:
        """Make the spare of this role ``worker``, if there is one."""
        process = self._waiting.get(worker.role)
        if process is None or process.poll() is not None:
            return None
        del self._waiting[worker.role]
        self._due[worker.role] = now + PAUSE_S
        return process if assign_slot(process, worker) else None

    def end(self) -> None:
        """Kill them, and start no more."""
        for process in self._waiting.values():
            process.kill()
        for process in self._waiting.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._waiting.clear()
        self._due.clear()
        self._has_begun = True
