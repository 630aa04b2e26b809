"""``quintet serve --headless``: keeps a host's place in a model on several, for as long as it takes.

The first host says what is computed. Whatever ends the connection (a rank that died anywhere, the first host's executor, the
network) this host joins again, for the executor's next epoch; it ends by itself only where asking again changes nothing.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import msgspec
import setproctitle

from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import hosts_config
from quintet.deploy.config.memory import available_ram_bytes
from quintet.deploy.config.rules import check_ranges
from quintet.deploy.config.sections import folder_of
from quintet.deploy.config.source import locate_model
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.service_manager import ServiceManager
from quintet.executor.distributed.hosts.member import OwnPlace
from quintet.executor.distributed.parallel.follower_processes import ending
from quintet.process.log import configure_logging
from quintet.process.sockets import make_run_dir
from quintet.wire.errors import EXIT_CONFIG, ConfigError

MODULE = "quintet.executor.distributed.hosts.member"
TICK_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two members, where the first of them did not live long."""
LIVED_S = 5.0
"""Whoever has lived so long is followed at once."""

log = logging.getLogger("quintet")


class Leave:
    """Whether it is time to: there was a signal, or whoever started this host has ended."""

    def __init__(self, parent_fd: int | None) -> None:
        """Listen to signals. Belongs to the main thread."""
        self._parent_fd = parent_fd
        self._is_told = False
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

    def is_due(self) -> bool:
        """Look, without waiting."""
        if (
            not self._is_told
            and self._parent_fd is not None
            and select.select([self._parent_fd], [], [], 0)[0]
        ):
            self._is_told = os.read(self._parent_fd, 4096) == b""
        return self._is_told


def serve_headless(options: Options, parent_fd: int | None = None) -> int:
    """Be a host that is not the first until told to stop; return the exit status. Raises `ConfigError`.

    The end of file at ``parent_fd`` tells it too.
    """
    setproctitle.setproctitle("quintet-supervisor")
    configure_logging("supervisor", options.log_level)
    check_ranges(options)
    hosts = hosts_config(options)
    assert hosts is not None, "a host without others"
    model = locate_model(
        options.model, options.load_format == "auto", with_code=options.trust_remote_code
    )  # before anybody waits for it
    run_dirs.sweep_stale()
    run_dir = make_run_dir()
    claim = run_dirs.claim(run_dir)
    own = OwnPlace(
        host=options.node_rank,
        hosts=hosts,
        run_dir=str(run_dir),
        model_path=str(model),
        packed_cache=folder_of(options.packed_cache),
        threads=options.threads,
        log_level=options.log_level,
        available_bytes=available_ram_bytes(),
    )
    leave = Leave(parent_fd)
    manager = ServiceManager(os.environ)
    manager.ready(f"{hosts.address} as host {own.host}")
    try:
        _keep_place(own, run_dir, leave, manager)
    finally:
        manager.close()
        shutil.rmtree(run_dir, ignore_errors=True)
        os.close(claim)
    return 0


def _keep_place(own: OwnPlace, run_dir: Path, leave: Leave, manager: ServiceManager) -> None:
    """Have one member after another until it is time to leave. Raises `ConfigError` where the last one could not be another."""
    pause_s, said = 0.0, ""
    while not leave.is_due():
        begun = time.monotonic()
        status = _be_member(own, leave, manager)
        words = _last_words(run_dir) or f"host {own.host} {ending(status)}"
        if leave.is_due():
            return
        if status == EXIT_CONFIG:
            raise ConfigError(words)
        has_lived = time.monotonic() - begun > LIVED_S
        if words != said or has_lived:
            log.warning("%s; asking again", words)
        pause_s = 0.0 if has_lived else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        said, until = words, time.monotonic() + pause_s
        while not leave.is_due() and time.monotonic() < until:
            time.sleep(min(TICK_S, pause_s))


def _be_member(own: OwnPlace, leave: Leave, manager: ServiceManager) -> int:
    """Start one and return its exit status; end it when it is time to leave."""
    with tempfile.TemporaryFile() as written:
        written.write(msgspec.json.encode(own))
        written.seek(0)
        command = [sys.executable, "-P", "-m", MODULE, "--parent", str(os.getpid())]
        process = subprocess.Popen(command, stdin=written, process_group=0)
    try:
        while not leave.is_due():
            manager.alive(time.monotonic())
            try:
                return process.wait(TICK_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()  # its ranks are killed with it
        status = process.wait()
    return status


def _last_words(run_dir: Path) -> str:
    """Return what the member, or one of its ranks, has left, the first of them; nothing where there is none."""
    files = sorted(run_dir.glob("*.error"), key=lambda file: file.stat().st_mtime)
    words = files[0].read_text() if files else ""
    for file in files:
        file.unlink()
    return words
