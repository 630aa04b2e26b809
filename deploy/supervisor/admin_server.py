"""Server side of ``quintet admin``: validates a command and starts the change, or replies with an error.

``changes.py`` carries out the changes.

It checks the memory before engines are added: each engine has its own weights and KV memory.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, available_ram_bytes, format_size
from quintet.deploy.supervisor.changes import Changes
from quintet.deploy.supervisor.commands import CommandError, Scale, Status, parse, status_lines
from quintet.deploy.supervisor.process_slots import SlotTable
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.supervision import Command, CommandAnswer


def check_memory(config: EngineConfig, num_more: int, available_bytes: int) -> None:
    """Raise `CommandError` if ``num_more`` engines need more host memory than ``available_bytes``.

    The kernel allocates pages on first write, so unused KV memory of running engines counts as free.
    """
    if num_more <= 0 or config.executor.kind == "mock" or config.executor.device != "cpu":
        return
    if config.executor.hosts is not None:
        raise CommandError("a multi-host engine cannot be scaled: start another group of hosts")
    num_ranks, kv_memories = config.executor.num_ranks, config.executor.num_kv_memories
    weights, kv = config.executor.weight_bytes * num_ranks, config.cache.memory_bytes * kv_memories
    each = weights + kv + ATTENTION_SCRATCH_BYTES * num_ranks + config.executor.shared_bytes
    if num_more * each > available_bytes:
        needed, left = format_size(num_more * each), format_size(available_bytes)
        raise CommandError(
            f"{num_more} more engine{'s' * (num_more > 1)} would take {needed} (each {format_size(weights)} of weights and "
            f"{format_size(kv)} of KV), but {left} of memory are available: to scale later, start the server with a "
            "smaller --kv-cache-memory"
        )


class AdminClient:
    """Reply channel to one run of ``quintet admin``."""

    def __init__(self, bus: Bus, run_dir: Path, reply_to: str) -> None:
        """Raise `CommandError` for an address outside the run folder."""
        if not re.fullmatch(rf"ipc://{re.escape(str(run_dir))}/admin-[\w-]+", reply_to):
            raise CommandError(f"{reply_to!r} is not an address in the run folder")
        self._outbox = bus.open_outbox(SUPERVISOR, reply_to)

    def say(self, line: str) -> None:
        """Send a line of progress."""
        self._outbox.send(encode(CommandAnswer(line)))

    def end(self, line: str, *, failed: bool = False) -> None:
        """Send the last line and close the channel."""
        self._outbox.send(encode(CommandAnswer(line, is_last=True, failed=failed)))
        self._outbox.close(drop=False)


class AdminServer:
    """Handles commands in order of arrival. At most one change is in progress."""

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
        """Answer a command, or start its change. ``phase`` is the name of the server's lifecycle phase."""
        try:
            client = AdminClient(self._bus, Path(self._config.run_dir), command.reply_to)
        except CommandError as error:
            self._log.warning("admin: command dropped: %s", error)
            return
        try:
            parsed = parse(command.words)
            if isinstance(parsed, Status):
                self._send_status(client, phase, now)
                return
            if not is_serving:
                raise CommandError(f"the server is {phase}; changes are possible only while it is serving")
            if self._changes.name:
                raise CommandError(f"{self._changes.name} is in progress; retry when it is done")
            if isinstance(parsed, Scale):
                num_engines = len(self._slots.active(Role.CORE))
                num_more = parsed.wanted.get(Role.CORE, num_engines) - num_engines
                check_memory(self._config, num_more, available_ram_bytes())
            roles = set(parsed.wanted) if isinstance(parsed, Scale) else {parsed.role}
            if Role.FRONTEND in roles and not self._has_frontends:
                raise CommandError("this server has no frontend processes: a Python program is its frontend")
        except CommandError as error:
            client.end(str(error), failed=True)
            return
        limit_s = parsed.drain_timeout_s
        if limit_s is None:
            limit_s = self._config.processes.drain_timeout_s
        if isinstance(parsed, Scale):
            steps = self._changes.scale(parsed.wanted, limit_s, client.say)
        else:
            steps = self._changes.restart(parsed.role, limit_s, client.say)
        name = " ".join(command.words)
        self._log.info("%s", name)
        self._changes.begin(name, steps, client)

    def _send_status(self, client: AdminClient, phase: str, now: float) -> None:
        changing = f"; {self._changes.name} is in progress" if self._changes.name else ""
        names = ", ".join(self._config.model.served_names)
        client.say(f"{names} on port {self._config.frontend.port}: {phase}{changing}")
        for line in status_lines(self._slots.process_metrics(now)):
            client.say(line)
        client.end("")
