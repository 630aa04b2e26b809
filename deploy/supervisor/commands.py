"""Parser of ``quintet admin`` commands, and the status table. ``changes.py`` carries out the commands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.deploy.supervisor.changes import SCALABLE
from quintet.wire.ids import Role
from quintet.wire.supervision import ProcessMetrics

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
    """Return a table of the processes."""
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
