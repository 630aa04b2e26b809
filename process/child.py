"""Start of a child process: arguments, configuration, slot, and the report of a fatal error.

A child exits with its parent. The loop is `quintet.process.runtime`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import setproctitle

from quintet.process.log import configure_logging
from quintet.process.os_tuning import set_batch_scheduling
from quintet.process.runtime import HandlerError, Stopping
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError
from quintet.wire.ids import Role, WorkerId

CONFIG_FILE = "config.json"


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def child_main(
    role: Role,
    run: Callable[..., None],
    prepare: Callable[[EngineConfig], object] | None = None,
    begin: Callable[[], object] | None = None,
) -> None:
    """Run the ``main`` of a child process: ``python -m quintet.<folder>.main --run-dir … --index … --epoch … --parent …``.

    ``run`` is called with the slot, the configuration and the result of ``prepare``. Without ``--index`` and
    ``--epoch`` the process is a standby: after ``prepare`` it waits for the line ``INDEX EPOCH`` on standard input,
    and exits when that closes. With ``--early`` there is no configuration yet: the process calls ``begin`` first,
    then waits for that line.

    An exception that escapes ``run`` is written to ``<run_dir>/<worker>.error`` for the supervisor's report.
    """
    parser = argparse.ArgumentParser(
        description=f"The {role} process of a Quintet server; started by `quintet serve`."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and the sockets")
    parser.add_argument("--index", type=int, help="slot among processes of this role")
    parser.add_argument("--epoch", type=int, help="start number of this slot, from 1")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--early", action="store_true", help="start before the configuration is written")
    parser.add_argument("--cores", help="CPU cores to run on after loading, comma-separated")
    arguments = parser.parse_args()

    die_with_parent()
    if os.getppid() != arguments.parent:
        raise SystemExit("the supervisor is gone")
    faulthandler.enable()
    # A terminal's Ctrl-C reaches all processes; the supervisor decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role is not Role.EXECUTOR:
        set_batch_scheduling()
    me = None if arguments.index is None else WorkerId(role, arguments.index, arguments.epoch or 1)
    if arguments.early:
        setproctitle.setproctitle(f"quintet-{role}-early")
        if begin is not None:
            begin()
        try:
            me = _await_slot(role)
        except Stopping:
            return
    config = EngineConfig.read(arguments.run_dir / CONFIG_FILE)
    log = _configure_process(me or f"{role}-spare", config)
    try:
        prepared = () if prepare is None else (prepare(config),)
        if me is None:
            me = _await_slot(role)
            log = _configure_process(me, config)
        gc.enable()
        if arguments.cores is not None:
            # If the container's cores have changed meanwhile, keep the current affinity.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
        run(me, config, *prepared)
    except Stopping:
        pass
    except ConfigError as error:
        error_file(arguments.run_dir, me or f"{role}-spare").write_text(str(error))
        sys.exit(EXIT_CONFIG)
    except Exception as error:  # noqa: BLE001 - outermost handler: report the error, then exit
        what = str(error) if isinstance(error, HandlerError) else f"{type(error).__name__}: {error}"
        error_file(arguments.run_dir, me or f"{role}-spare").write_text(what)
        log.critical("died of %s\n%s", what.partition(":")[0], traceback.format_exc())
        sys.exit(1)


def _configure_process(me: WorkerId | str, config: EngineConfig) -> logging.Logger:
    """Set the process title and configure logging."""
    name = f"{me.role}-{me.index}" if isinstance(me, WorkerId) else me
    setproctitle.setproctitle(f"quintet-{name}")
    return configure_logging(me, config.log_level)


def _await_slot(role: Role) -> WorkerId:
    """Return the slot assigned to a standby process. Raises `Stopping` when there will be none."""
    words = sys.stdin.readline().split()
    if not words:
        raise Stopping
    index, epoch = map(int, words)
    return WorkerId(role, index, epoch)


def error_file(run_dir: str | Path, worker: WorkerId | str) -> Path:
    """Return the path of a dying child's error report."""
    return Path(run_dir) / f"{worker}.error"
