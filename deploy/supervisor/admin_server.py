"""Where ``quintet admin`` is heard and answered: begins what an operator asks for, or says why not.

Knows the words and who may be asked; the changes themselves are made in ``changes.py``.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from quintet.deploy.config.memory import available_ram_bytes
from quintet.deploy.supervisor.changes import Changes
from quintet.deploy.supervisor.commands import CommandError, Scale, Status, parse, status_lines
from quintet.deploy.supervisor.memory_check import check_room
from quintet.deploy.supervisor.process_slots import SlotTable
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.supervision import Command, CommandAnswer


class Asker:
    """The way back to one run of ``quintet admin``."""

    def __init__(self, bus: Bus, run_dir: Path, reply_to: str) -> None:
        """Raise `CommandError` for an address outside the run folder."""
        if not re.fullmatch(rf"ipc://{re.escape(str(run_dir))}/admin-[\w-]+", reply_to):
            raise CommandError(f"{reply_to!r} is not an address in the run folder")
        self._outbox = bus.open_outbox(SUPERVISOR, reply_to)

    def say(self, line: str) -> None:
        """Send a line of progress."""
        self._outbox.send(encode(CommandAnswer(line)))

    def end(self, line: str, *, failed: bool = False) -> None:
        """Send the last line, and hang up."""
        self._outbox.send(encode(CommandAnswer(line, is_last=True, failed=failed)))
        self._outbox.close(drop=False)


class AdminServer:
    """Takes one command after the other; changes take their time and are one at a time."""

    def __init__(
        self, config: EngineConfig, bus: Bus, slots: SlotTable, changes: Changes, *, has_frontends: bool
    ) -> None:
        self._config = config
        self._bus = bus
        self._slots = slots
        self._changes = changes
        self._has_frontends = has_frontends
        self._log = logging.getLogger("quintet")

    def receive(self, command: Command, phase: str, is_serving: bool, now: float) -> None:
        """Answer a command, or begin to carry it out. ``phase``: of the server's life, in a word."""
        try:
            asker = Asker(self._bus, Path(self._config.run_dir), command.reply_to)
        except CommandError as error:
            self._log.warning("a command was dropped: %s", error)
            return
        try:
            wish = parse(command.words)
            if isinstance(wish, Status):
                self._tell_status(asker, phase, now)
                return
            if not is_serving:
                raise CommandError(f"the server is {phase}; only a serving one can be changed")
            if self._changes.name:
                raise CommandError(f"{self._changes.name} is in progress; try again when it is done")
            if isinstance(wish, Scale):
                there = len(self._slots.lasting(Role.CORE))
                check_room(self._config, wish.wanted.get(Role.CORE, there) - there, available_ram_bytes())
            roles = set(wish.wanted) if isinstance(wish, Scale) else {wish.role}
            if Role.FRONTEND in roles and not self._has_frontends:
                raise CommandError(
                    "this server has no frontends of its own: a Python program is its frontend"
                )
        except CommandError as error:
            asker.end(str(error), failed=True)
            return
        limit_s = wish.drain_timeout_s
        if limit_s is None:
            limit_s = self._config.processes.drain_timeout_s
        if isinstance(wish, Scale):
            steps = self._changes.scale(wish.wanted, limit_s, asker.say)
        else:
            steps = self._changes.restart(wish.role, limit_s, asker.say)
        name = " ".join(command.words)
        self._log.info("%s", name)
        self._changes.begin(name, steps, asker)

    def _tell_status(self, asker: Asker, phase: str, now: float) -> None:
        changing = f"; {self._changes.name} is in progress" if self._changes.name else ""
        names = ", ".join(self._config.model.served_names)
        asker.say(f"{names} on port {self._config.frontend.port}: {phase}{changing}")
        for line in status_lines(self._slots.figures(now)):
            asker.say(line)
        asker.end("")
