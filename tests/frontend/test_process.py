"""Frontend process: inherited socket, messages, drain, stop."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.frontend.main import Frontend
from quintet.process.child import CONFIG_FILE
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Text
from quintet.wire.supervision import (
    Drain,
    Drained,
    Heartbeat,
    MetricsQuery,
    ProcessSlot,
    Ready,
    SlotState,
    Stop,
    Topology,
)
from tests.frontend.configs import make_config

DEADLINE_S = 20.0
ME = WorkerId(Role.FRONTEND, 0, 1)


class Parent:
    """The part of a supervisor that one child needs."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        config = make_config(str(run_dir), heartbeat_s=0.1)
        config.write(run_dir / CONFIG_FILE)
        self.bus = Bus(run_dir)
        accepts: Any = Ready | Heartbeat | Drained | MetricsQuery
        self.inbox: Inbox[Any] = Inbox(self.bus, address_of(run_dir, SUPERVISOR), accepts)
        self.peers = Peers(self.bus)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        command = [sys.executable, "-m", "quintet.frontend.main", "--run-dir", str(run_dir)]
        self.child = subprocess.Popen(
            [*command, "--index", "0", "--epoch", "1", "--parent", str(os.getpid())],
            pass_fds=[self.listener.fileno()],
            env={**os.environ, "QUINTET_LISTEN_FD": str(self.listener.fileno())},
        )
        self.peers.connect(ME, address_of(run_dir, ME))

    def wait_for(self, kind: type[msgspec.Struct]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for message in self.inbox.wait(1.0):
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S} s")

    def await_ready(self) -> Ready:
        """Wait until the child is ready, and acknowledge it as the supervisor does."""
        ready = self.wait_for(Ready)
        self.peers.send(Role.FRONTEND, 0, Topology(1, [self.slot_of(ME)]))
        assert isinstance(ready, Ready)
        return ready

    def slot_of(self, worker: WorkerId) -> ProcessSlot:
        """Return the topology slot of a ready process."""
        return ProcessSlot(worker, address_of(self.run_dir, worker), 1, SlotState.READY)

    def get(self, path: str) -> int:
        """Return the status of a page."""
        return self._get(path)[0]

    def get_body(self, path: str) -> bytes:
        """Return the body of a page."""
        return self._get(path)[1]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.listener.close()
        self.inbox.close()
        self.peers.close()
        self.bus.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture
def parent() -> Iterator[Parent]:
    run_dir = make_run_dir()
    parent = Parent(run_dir)
    yield parent
    parent.close()
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()


def test_frontend_serves_drains_and_stops(parent: Parent) -> None:
    ready = parent.await_ready()
    assert (ready.worker, ready.pid) == (ME, parent.child.pid)
    assert parent.get("/livez") == 200
    assert parent.get("/readyz") == 503
    assert parent.wait_for(Heartbeat).pending == 0
    parent.child.send_signal(signal.SIGINT)
    parent.peers.send(Role.FRONTEND, 0, Topology(2, [], draining=True))
    parent.peers.send(Role.FRONTEND, 0, Drain())
    assert parent.wait_for(Drained).worker == ME
    parent.peers.send(Role.FRONTEND, 0, Stop())
    assert parent.child.wait(DEADLINE_S) == 0


def test_draining_frontend_closes_idle_connections_first(parent: Parent) -> None:
    parent.await_ready()
    connection = http.client.HTTPConnection("127.0.0.1", parent.port, timeout=DEADLINE_S)
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b"ok"
    parent.peers.send(Role.FRONTEND, 0, Drain())
    assert parent.wait_for(Drained).worker == ME
    assert connection.sock.recv(1) == b"", "idle connection is closed"
    connection.close()
    parent.peers.send(Role.FRONTEND, 0, Stop())
    assert parent.child.wait(DEADLINE_S) == 0


def test_stop_ends_open_requests_with_an_error(parent: Parent) -> None:
    parent.await_ready()
    roles = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
    workers = [WorkerId(role, 0, 1) for role in roles]
    parent.peers.send(Role.FRONTEND, 0, Topology(2, [parent.slot_of(worker) for worker in workers]))
    connection = http.client.HTTPConnection("127.0.0.1", parent.port, timeout=DEADLINE_S)
    try:
        until(lambda: parent.get("/readyz") == 200)
        connection.request("POST", "/v1/completions", b'{"prompt":"x","stream":true}')
        until(lambda: parent.get_body("/load") == b'{"server_load":1}')
        parent.peers.send(Role.FRONTEND, 0, Stop())
        response = connection.getresponse()
        assert response.status == 503
        assert b"shutting down" in response.read()
    finally:
        connection.close()
    assert parent.child.wait(DEADLINE_S) == 0


def test_first_connection_is_accepted_after_the_topology(parent: Parent) -> None:
    parent.wait_for(Ready)
    workers = [WorkerId(role, 0, 1) for role in Role if role is not Role.SUPERVISOR]
    connection = http.client.HTTPConnection("127.0.0.1", parent.port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/readyz")
        parent.peers.send(Role.FRONTEND, 0, Topology(1, [parent.slot_of(worker) for worker in workers]))
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def test_invalid_message_is_dropped(parent: Parent) -> None:
    parent.await_ready()
    mismatched = Text(1, 0, 0, [], [1, 2], ["only one"], [0], [0], [0], b"", [])
    parent.peers.send(Role.FRONTEND, 0, mismatched)
    parent.peers.send(Role.FRONTEND, 0, Topology(2, [], draining=True))
    parent.peers.send(Role.FRONTEND, 0, Drain())
    parent.wait_for(Drained)


def test_error_of_one_connection_does_not_end_the_process() -> None:
    async def scenario() -> None:
        errors: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        frontend = Frontend.__new__(Frontend)
        frontend._crash = None
        loop.set_exception_handler(lambda _, context: errors.append(context))
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)
        frontend._on_loop_error(loop, errors[0])
        assert frontend._crash is None

    asyncio.run(scenario())


def test_stop_during_a_request_body_leaves_no_traceback(
    parent: Parent, capfd: pytest.CaptureFixture[str]
) -> None:
    parent.await_ready()
    with socket.create_connection(("127.0.0.1", parent.port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert parent.get("/livez") == 200
        parent.peers.send(Role.FRONTEND, 0, Stop())
        assert parent.child.wait(DEADLINE_S) == 0
    assert "Traceback" not in capfd.readouterr().err
