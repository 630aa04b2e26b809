"""Notifications to systemd: over a real socket, from a real supervisor."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.supervisor.supervised import DEADLINE_S, make_config, world

from quintet.deploy.supervisor.service_manager import ServiceManager

UNIT = Path(__file__).parents[3] / "deploy" / "integrations" / "systemd" / "quintet.service"


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(DEADLINE_S)
        yield listener


def next_other_than(listener: socket.socket, word: str) -> list[str]:
    while (lines := listener.recv(4096).decode().splitlines()) == [word]:
        pass
    return lines


def test_server_notifies_ready_watchdog_and_stopping(
    notify_socket: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", notify_socket.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    with world(tmp_path) as server:
        process = server.start(config=make_config(server.run_dir, drain_timeout_s=7))
        ready, status = next_other_than(notify_socket, "WATCHDOG=1")
        assert (ready, status[:26]) == ("READY=1", "STATUS=Serving on http://1")
        assert notify_socket.recv(4096) == b"WATCHDOG=1"
        process.send_signal(signal.SIGTERM)
        leaving, longer, _ = next_other_than(notify_socket, "WATCHDOG=1")
        assert (leaving, longer) == ("STOPPING=1", "EXTEND_TIMEOUT_USEC=13000000")
        assert server.end()[0] == 0


def test_watchdog_is_notified_four_times_an_interval(notify_socket: socket.socket) -> None:
    address = notify_socket.getsockname()
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000"})
    for now in (10.0, 11.9, 12.0, 13.9, 14.1):
        manager.alive(now)
    manager.ready("http://x")
    assert [notify_socket.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    assert notify_socket.recv(4096).startswith(b"READY=1")
    manager.close()


def test_failed_readiness_notification_is_repeated_once(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    manager = ServiceManager({"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "8000000"})
    manager.ready("http://x")
    manager.alive(10.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(DEADLINE_S)
        for now in (10.1, 10.2, 12.1):
            manager.alive(now)
        assert listener.recv(4096).startswith(b"READY=1")
        assert listener.recv(4096) == listener.recv(4096) == b"WATCHDOG=1"
        manager.stopping(1.0)
        assert listener.recv(4096).startswith(b"STOPPING=1")
    manager.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "@quintet-unused", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"},
    ],
)
def test_missing_listener_is_ignored(environment: dict[str, str]) -> None:
    manager = ServiceManager(environment)
    manager.ready("http://x")
    manager.alive(1.0)
    manager.stopping(30.0)
    manager.close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's systemd")
def test_systemd_verifies_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "quintet.service"
    unit.write_text(UNIT.read_text().replace("/opt/quintet/bin/quintet ", "/bin/true "))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
