"""What every process that an executor starts beside itself does first: find out who it is, and die with who started it."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle

from quintet.process.log import configure_logging
from quintet.process.runtime import die_with_parent, error_file
from quintet.process.trace import WRITE_NOW
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError
from quintet.wire.ids import Role, WorkerId


@dataclass(frozen=True, slots=True)
class ChildIdentity:
    """Whose process this is."""

    me: WorkerId
    rank: int
    """Of the executor; 0 where the process is none."""


Work = Callable[[ChildIdentity, EngineConfig, argparse.Namespace], None]


def be_child(kind: str, work: Work) -> None:
    """Work until the parent ends, or this fails. kind: a word for titles. The configuration comes by standard input."""
    parser = argparse.ArgumentParser(description="A process of an executor; started by its first one.")
    parser.add_argument("--index", type=int, required=True, help="slot of the executor")
    parser.add_argument("--epoch", type=int, required=True, help="how often that slot has been filled")
    parser.add_argument("--rank", type=int, required=True, help="which rank, or 0")
    parser.add_argument("--groups", default="", help="descriptors of the memory of each stage's ranks")
    parser.add_argument(
        "--links", default="", help="descriptors of the memory between each stage and the next"
    )
    parser.add_argument("--crossings", default="", help="descriptor of the memory where parts of blocks meet")
    parser.add_argument("--parent", type=int, required=True, help="process id of who started it")
    arguments = parser.parse_args()
    begin_child(arguments.parent)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    me = WorkerId(Role.EXECUTOR, arguments.index, arguments.epoch)
    number = str(arguments.rank or "")
    setproctitle.setproctitle("-".join(filter(None, (f"quintet-{me.role}-{me.index}", kind, number))))
    configure_logging(f"{me}.{kind}{number}", config.log_level)
    try:
        work(ChildIdentity(me, arguments.rank), config, arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others end with this one
        end_child(error, error_file(config.run_dir, me), f"{kind} {number}".strip())


def begin_child(parent: int) -> None:
    """Die with who started this process, by its id."""
    die_with_parent()
    if os.getppid() != parent:
        raise SystemExit("who started this is gone")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the supervisor decides
    signal.signal(WRITE_NOW, signal.SIG_IGN)  # sent to processes by their names: most of these record nothing


def end_child(error: Exception, last_words: Path, name: str, *, at_once: bool = False) -> NoReturn:
    """End of an error: what it is goes into a file, and the log has the rest.

    name: of this process, before the words. at_once: whatever other threads do.
    """
    is_config, is_expected = isinstance(error, ConfigError), isinstance(error, ExpectedEnd)
    words = str(error) if is_config or is_expected else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        last_words.write_text(f"{name}: {words}")
    log = logging.getLogger("quintet")
    if is_expected:
        log.error("%s", words)
    elif not is_config:
        log.critical("died of %s", type(error).__name__, exc_info=error)
    status = EXIT_CONFIG if is_config else 1
    if at_once:
        os._exit(status)
    sys.exit(status)


class ExpectedEnd(Exception):
    """Nothing is wrong with this process; the message says what is."""


def numbers(words: str) -> tuple[int, ...]:
    """Return what such an argument lists."""
    return tuple(int(word) for word in words.split(",") if word)
