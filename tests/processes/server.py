"""Real servers and routers for tests: `quintet serve` and `quintet route` on free ports."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from quintet.process.runtime import METRICS_S

LISTENING = re.compile(r"listening on (\S+) port (\d+)")
"""Ready line of a router."""
READY = re.compile(r"Quintet is ready: (https?://[\w.:\[\]]+|unix:\S+)")


@dataclass
class Server:
    """A running server and its output."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def children(self) -> dict[str, psutil.Process]:
        """Return the server's processes by title, e.g. ``quintet-core-0``, without standby processes."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = (child.cmdline() or [""])[0]
                if title.startswith("quintet-") and not title.strip().endswith(("-spare", "-supervisor")):
                    found[title.strip()] = child
        return found

    def get(self, path: str) -> tuple[int, str]:
        """GET a path; return status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, body: object, timeout_s: float = 60.0) -> tuple[int, Any]:
        """POST JSON; return the status and the decoded response."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def gauge(self, name: str) -> float:
        """Return the sum of a Prometheus series over its labels.

        NaN if the series is missing, e.g. after a process was replaced.
        """
        _, text = self.get("/metrics")
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values)) if values else math.nan

    def gauge_of(self, name: str, event: str) -> float:
        """Return the sum of a Prometheus series with the label ``event``."""
        _, text = self.get("/metrics")
        values = re.findall(rf'^{re.escape(name)}{{[^}}]*event="{event}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, values)) if values else math.nan

    def await_metrics(self) -> None:
        """Return once all metrics are newer than this call. Processes send theirs in heartbeats, once a second."""
        began_s = time.monotonic()

        def all_are_newer() -> bool:
            now_s = time.monotonic()
            everyone = json.loads(self.get("/health?verbose")[1]).get("all_processes", [])
            newest_s = now_s - began_s - METRICS_S
            return bool(everyone) and all(each["heartbeat_age_s"] < newest_s for each in everyone)

        wait_until(all_are_newer, "a heartbeat of each process")

    def stop(self) -> int:
        """Drain and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def wait_until(happened: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll a condition; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.02)


@contextlib.contextmanager
def serve(
    *arguments: str, wait_ready: bool = True, program: str = "quintet.deploy.cli.main"
) -> Iterator[Server]:
    """Run ``quintet serve`` with ``arguments`` on a free port; kill remaining processes at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", program, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip())
            if match := READY.search(line):
                server.url = match[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    left: list[psutil.Process] = []
    try:
        if wait_ready:
            assert ready.wait(120) and server.url, "not ready:\n" + "\n".join(server.lines)
        yield server
        if process.poll() is None:
            left = list(server.children().values())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(10)
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def route(*flags: str) -> Iterator[Server]:
    """Run ``quintet route`` on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quintet.deploy.cli.main", "route", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    router, is_ready = Server(process), threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            router.lines.append(line.rstrip())
            if match := LISTENING.search(line):
                router.url = f"http://{match[1]}:{match[2]}"
                is_ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert is_ready.wait(60), router.lines
        yield router
        assert router.stop() in (0, -signal.SIGKILL)  # a test may have killed it
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
