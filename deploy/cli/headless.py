"""``quintet serve --headless``: runs a worker host of a multi-host model.

Host 0 sends the configuration. After any connection loss (failed rank, restarted executor of host 0, network), this host rejoins
for the executor's next epoch. It exits by itself only on a configuration error.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import setproctitle

from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import hosts_config
from quintet.deploy.config.memory import available_ram_bytes
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.rules import check_ranges
from quintet.deploy.config.sections import folder_of
from quintet.deploy.config.speculation import with_verifier
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.event_loop import EventLoop
from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.deploy.supervisor.service_manager import ServiceManager
from quintet.executor.distributed.hosts.member import MemberSettings
from quintet.executor.distributed.parallel.follower_processes import ending
from quintet.process.log import configure_logging
from quintet.wire.errors import EXIT_CONFIG, ConfigError

MODULE = "quintet.executor.distributed.hosts.member"
TICK_S = 0.2
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Backoff between restarts of a member that failed early."""
STABLE_S = 5.0
"""A member that ran at least this long is restarted without backoff."""

log = logging.getLogger("quintet")


def serve_headless(options: Options, parent_fd: int | None = None) -> int:
    """Run a worker host until it is stopped; return the exit status. Raises `ConfigError`.

    End of file at ``parent_fd`` also stops it.
    """
    setproctitle.setproctitle("quintet-supervisor")
    configure_logging("supervisor", options.log_level)
    check_ranges(options)
    hosts = hosts_config(options)
    assert hosts is not None, "--headless without other hosts"
    model = located(options)  # downloads before joining
    run_dirs.sweep_stale()
    run_dir = make_run_dir()
    claim = run_dirs.claim(run_dir)
    own = MemberSettings(
        host=options.node_rank,
        hosts=hosts,
        run_dir=str(run_dir),
        model_path=str(model),
        packed_cache=folder_of(options.packed_cache),
        threads=options.threads,
        log_level=options.log_level,
        available_bytes=available_ram_bytes(),
    )
    events = EventLoop(None, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), parent_fd)
    manager = ServiceManager(os.environ)
    manager.ready(f"{hosts.address} as host {own.host}")
    try:
        _run_members(own, run_dir, events, manager)
    finally:
        events.close()
        manager.close()
        shutil.rmtree(run_dir, ignore_errors=True)
        os.close(claim)
    return 0


def located(options: Options) -> Path:
    """Return the local folder of MODEL; of the model that it names, if it is a draft head. Raises `ConfigError`."""
    options = with_verifier(options)
    return locate_model(
        options.model,
        options.load_format == "auto",
        with_code=options.trust_remote_code,
        revision=options.revision,
    )


def _is_stopped(events: EventLoop) -> bool:
    events.wait(0)
    return events.parent_exited or bool(events.signals)


def _run_members(own: MemberSettings, run_dir: Path, events: EventLoop, manager: ServiceManager) -> None:
    """Restart the member process until stopped. Raises `ConfigError` if a restart cannot help."""
    pause_s, last_logged = 0.0, ""
    while not _is_stopped(events):
        started_s = time.monotonic()
        status = _run_member(own, events, manager)
        reason = _first_error(run_dir) or f"host {own.host} {ending(status)}"
        if _is_stopped(events):
            return
        if status == EXIT_CONFIG:
            raise ConfigError(reason)
        was_stable = time.monotonic() - started_s > STABLE_S
        if reason != last_logged or was_stable:
            log.warning("%s; rejoining", reason)
        pause_s = 0.0 if was_stable else min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * pause_s))
        last_logged, until = reason, time.monotonic() + pause_s
        while not _is_stopped(events) and time.monotonic() < until:
            events.wait(min(TICK_S, pause_s))


def _run_member(own: MemberSettings, events: EventLoop, manager: ServiceManager) -> int:
    """Run one member process and return its exit status; kill it when stopped."""
    with tempfile.TemporaryFile() as written:
        written.write(msgspec.json.encode(own))
        written.seek(0)
        command = [sys.executable, "-P", "-m", MODULE, "--parent", str(os.getpid())]
        process = subprocess.Popen(command, stdin=written, process_group=0)
    try:
        while not _is_stopped(events):
            manager.alive(time.monotonic())
            status = process.poll()
            if status is not None:
                return status
            events.wait(TICK_S)
    finally:
        process.kill()  # also kills its ranks
        status = process.wait()
    return status


def _first_error(run_dir: Path) -> str:
    """Return the first error file of the member or its ranks, or an empty text; remove all of them."""
    files = sorted(run_dir.glob("*.error"), key=lambda file: file.stat().st_mtime)
    message = files[0].read_text() if files else ""
    for file in files:
        file.unlink()
    return message
