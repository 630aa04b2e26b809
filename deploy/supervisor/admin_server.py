"""Server side of ``quintet admin``: parses a command and starts the change, or replies with an error.

``changes.py`` carries out the changes.

It checks the memory before engines are added: each engine has its own weights and KV memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, available_ram_bytes, format_size
from quintet.deploy.supervisor.changes import SCALABLE, Changes
from quintet.deploy.supervisor.process_slots import SlotTable
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.supervision import Command, CommandAnswer, ProcessMetrics

RESTARTABLE = (Role.FRONTEND, Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
MAX_PROCESSES = 64
"""Per role."""

ENGINE = "engine"
"""Name of a core and its executor together."""

_DRAIN_TIMEOUT = "drain-timeout"


class CommandError(Exception):
    """The command is invalid or impossible now; the message has the alternatives."""


@dataclass(frozen=True, slots=True)
class Status:
    """Show the state of all processes."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Replace the processes of a role."""

    role: Role
    drain_timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale each role to a number of processes."""

    wanted: Mapping[Role, int]
    """`Role.CORE` means engines."""
    drain_timeout_s: float | None


def parse(arguments: Sequence[str]) -> Status | Restart | Scale:
    """Parse the arguments of ``quintet admin``. Raises `CommandError`."""
    verb, *rest = arguments or [""]
    rest, drain_timeout_s = _take_timeout(rest)
    match verb, rest:
        case "status", []:
            return Status()
        case "restart", [name]:
            return Restart(_role(name, RESTARTABLE), drain_timeout_s)
        case "scale", [_, *_]:
            return Scale(dict(_count(word) for word in rest), drain_timeout_s)
        case _:
            raise CommandError(
                f"{' '.join(arguments)!r} is not a command; use `status`, `restart ROLE` or `scale ROLE=COUNT …`"
            )


def _take_timeout(arguments: Sequence[str]) -> tuple[list[str], float | None]:
    prefix = f"{_DRAIN_TIMEOUT}="
    given = [word.removeprefix(prefix) for word in arguments if word.startswith(prefix)]
    rest = [word for word in arguments if not word.startswith(prefix)]
    if not given:
        return rest, None
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", given[-1]):
        raise CommandError(f"{_DRAIN_TIMEOUT} is {given[-1]!r}; it must be a number of seconds, such as 120")
    return rest, float(given[-1])


def _role(name: str, possible: Sequence[Role], *others: str) -> Role:
    singular = name.removesuffix("s")
    for role in possible:
        if role == singular:
            return role
    raise CommandError(f"unknown role {name!r}; use one of {', '.join([*possible, *others])}")


def _count(word: str) -> tuple[Role, int]:
    match = re.fullmatch(r"(\w+)=(\d{1,6})", word)
    if match is None:
        raise CommandError(f"{word!r} is not ROLE=COUNT, such as detokenizers=3")
    is_engine = match[1].removesuffix("s") == ENGINE
    role, count = Role.CORE if is_engine else _role(match[1], SCALABLE, ENGINE), int(match[2])
    if not 1 <= count <= MAX_PROCESSES:
        raise CommandError(f"{word!r}: the number of processes must be 1 to {MAX_PROCESSES}")
    return role, count


def status_lines(processes: Sequence[ProcessMetrics]) -> list[str]:
    rows = [
        ("process", "state", "pid", "up", "completed", "pending", "heartbeat", "restarts", "cpu", "note"),
        *(
            (
                str(process.worker),
                process.state.name.lower(),
                str(process.pid),
                duration(process.uptime_s),
                str(process.progress),
                str(process.pending),
                f"{process.beat_age_s:.1f} s ago",
                str(process.restarts),
                duration(process.cpu_ns * 1e-9),
                process.note,
            )
            for process in processes
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_text = (True, True, False, False, False, False, False, False, False, True)
    return [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """Format a duration: ``4.2 s``, ``3 m 05 s``, ``2 h 10 m``, ``5 d 03 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {whole:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} m"
    return f"{hours // 24} d {hours % 24:02} h"


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
        self._outbox.send(encode(CommandAnswer(line)))

    def end(self, line: str, failed: bool = False) -> None:
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
        self._changes.begin(name, steps, client.end)

    def _send_status(self, client: AdminClient, phase: str, now: float) -> None:
        changing = f"; {self._changes.name} is in progress" if self._changes.name else ""
        names = ", ".join(self._config.model.served_names)
        client.say(f"{names} on port {self._config.frontend.port}: {phase}{changing}")
        for line in status_lines(self._slots.process_metrics(now)):
            client.say(line)
        client.end("")
