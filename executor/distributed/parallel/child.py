"""Start-up of every child process of an executor: parse its identity, and exit with the parent."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle

from quintet.executor.context import RankMemory
from quintet.process.child import die_with_parent, error_file
from quintet.process.log import configure_logging
from quintet.process.trace import WRITE_NOW
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError
from quintet.wire.ids import Role, WorkerId


@dataclass(frozen=True, slots=True)
class ChildIdentity:
    """Identity of a child process."""

    me: WorkerId
    rank: int
    """Rank in the executor; 0 for a process that is no rank."""
    memory: RankMemory = field(default_factory=RankMemory)


Work = Callable[[ChildIdentity, EngineConfig], None]


def run_child(kind: str, work: Work) -> None:
    """Run ``work`` until the parent exits or ``work`` fails. kind: process title. Reads the configuration from stdin."""
    parser = argparse.ArgumentParser(description="Run a child process of an executor; started by its leader.")
    parser.add_argument("--index", type=int, required=True, help="slot of the executor")
    parser.add_argument("--epoch", type=int, required=True, help="number of starts of that slot")
    parser.add_argument("--rank", type=int, required=True, help="rank, or 0 for the hub")
    parser.add_argument(
        "--memory", required=True, help="descriptors of the memory that the ranks share, as JSON"
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    begin_child(arguments.parent)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    me = WorkerId(Role.EXECUTOR, arguments.index, arguments.epoch)
    number = str(arguments.rank or "")
    setproctitle.setproctitle("-".join(filter(None, (f"quintet-{me.role}-{me.index}", kind, number))))
    configure_logging(f"{me}.{kind}{number}", config.log_level)
    try:
        memory = msgspec.json.decode(arguments.memory, type=RankMemory)
        work(ChildIdentity(me, arguments.rank, memory), config)
    except Exception as error:  # noqa: BLE001 - the other ranks exit with this process
        end_child(error, error_file(config.run_dir, me), f"{kind} {number}".strip())


def begin_child(parent: int) -> None:
    """Make this process exit with its parent, given by id."""
    die_with_parent()
    if os.getppid() != parent:
        raise SystemExit("the parent process has exited")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the supervisor decides
    signal.signal(WRITE_NOW, signal.SIG_IGN)  # sent by process name; most child processes record no trace


def end_child(error: Exception, error_path: Path, name: str, *, at_once: bool = False) -> NoReturn:
    """Exit after an error: write it to a file for the supervisor, and log it.

    name: of this process, a prefix of the text. at_once: exit without waiting for other threads.
    """
    is_config, is_expected = isinstance(error, ConfigError), isinstance(error, ExpectedEnd)
    reason = str(error) if is_config or is_expected else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        error_path.write_text(f"{name}: {reason}")
    log = logging.getLogger("quintet")
    if is_expected:
        log.error("%s", reason)
    elif not is_config:
        log.critical("exits after %s", type(error).__name__, exc_info=error)
    status = EXIT_CONFIG if is_config else 1
    if at_once:
        os._exit(status)
    sys.exit(status)


class ExpectedEnd(Exception):
    """An exit with a cause outside this process; the message names it."""
