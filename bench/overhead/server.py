"""Run `quintet serve` on a free port for a benchmark; read the CPU time of its processes and its histograms."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ask

_READY = re.compile(r"Quintet is ready: (http://\S+)")
_ROLE = re.compile(r"quintet-([a-z]+)")


@dataclass(slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    target: Target

    def cpu_seconds(self) -> dict[str, float]:
        """Return user and system CPU time so far, in seconds, by role; all threads included."""
        seconds: dict[str, float] = {}
        root = psutil.Process(self.process.pid)
        for process in (root, *root.children(recursive=True)):
            try:
                title = (process.cmdline() or [""])[0]
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            match = _ROLE.match(title)
            role = match[1] if match else "other"
            seconds[role] = seconds.get(role, 0.0) + times.user + times.system
        return seconds

    def histogram(self, name: str) -> tuple[float, float]:
        """Return sum and count of a histogram of the server, over all its series."""
        text = ask(self.target, "GET", "/metrics").body.decode()
        total, count = (
            sum(
                float(value)
                for value in re.findall(rf"^quintet:{name}_{part}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
            )
            for part in ("sum", "count")
        )
        return total, count


@contextmanager
def serve(
    model: Path | str | None,
    flags: Sequence[str] = (),
    checkout: Path | None = None,
    modules: Sequence[Path] = (),
) -> Iterator[Server]:
    """Run a server on a free port until the block ends. Without a model, it serves the embedded one.

    checkout: checkout with the server's code (default: the installed package). modules: further folders on the import path.
    """
    paths = [*map(str, modules), *([] if checkout is None else [str(checkout / "src")])]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "quintet.deploy.cli.main",
            "serve",
            *([] if model is None else [str(model)]),
            "--port",
            "0",
            "--log-level",
            "WARNING",
            "--no-standby",  # the start of standby processes would add CPU time
            *flags,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} if paths else None,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            ready = _READY.search(line)
            if ready:
                yield Server(process, ready[1], Target.parse(ready[1]))
                break
        else:
            raise RuntimeError(
                f"the server ended with status {process.wait()} before it was ready:\n{''.join(lines)}"
            )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
