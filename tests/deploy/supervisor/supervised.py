"""Runs a supervisor with fake children in a separate process, and receives their events over one socket."""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.process.child import CONFIG_FILE
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.ids import Role
from quintet.wire.kv_spec import full_layers

DEADLINE_S = 20.0
HERE = Path(__file__).parent
CHILDREN = [role for role in Role if role is not Role.SUPERVISOR]

Event = dict[str, Any]


def make_config(run_dir: Path, **processes: Any) -> EngineConfig:
    """Return a configuration that matters to processes only."""
    return EngineConfig(
        run_dir=str(run_dir),
        model=ModelConfig(
            path="/nowhere", tokenizer_path="/nowhere", served_names=["fake"], architecture="Fake", dtype="bfloat16",
            vocab_size=8, max_model_len=64, eos_token_ids=[1], kv=full_layers(1, 1, 8, 2, 16),
        ),
        cache=CacheConfig(memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        executor=ExecutorConfig(kind="mock"),
        frontend=FrontendConfig(port=0),
        processes=ProcessesConfig(**{"heartbeat_s": 0.2, **processes}),
    )  # fmt: skip


class World:
    """One supervisor and its children."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = make_run_dir()
        self._folder = folder
        self._events_path = str(self.run_dir) + ".events"
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._events.bind(self._events_path)
        self._received: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener_thread = threading.Thread(target=self._listen)
        self._listener_thread.start()
        self.seen: list[Event] = []
        self.process: subprocess.Popen[str] | None = None

    def start(
        self,
        script: dict[str, Any] | None = None,
        config: EngineConfig | None = None,
        options: dict[str, Any] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> subprocess.Popen[str]:
        """Start the supervisor; ``options`` are those of ``supervise.py``."""
        for role in CHILDREN:
            text = (
                "from tests.deploy.supervisor.fake_child import run_as\n"
                f"from quintet.wire.ids import Role\nrun_as(Role.{role.name})\n"
            )
            (self._folder / f"fake_{role}.py").write_text(text)
        (self._folder / "script.json").write_text(json.dumps(script or {}))
        (config or make_config(self.run_dir)).write(self.run_dir / CONFIG_FILE)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self._folder}:{HERE.parents[2]}:{HERE.parents[2] / 'src'}",
            "FAKE_SCRIPT": str(self._folder / "script.json"),
            "FAKE_EVENTS": self._events_path,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "supervise.py"), str(self.run_dir), json.dumps(options or {})],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=pass_fds,
        )  # fmt: skip
        return self.process

    def expect(self, event: str, matches: Callable[[Event], bool] = lambda event: True) -> Event:
        """Return the next matching event of this name; earlier events are kept in ``seen``."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                received = self._received.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no event {event!r}; received {self.seen}") from None
            self.seen.append(received)
            if received["event"] == event and matches(received):
                return received

    def _listen(self) -> None:
        """Keep the socket empty, so that no child waits for the test."""
        while frame := self._events.recv(1 << 16):
            self._received.put(json.loads(frame))

    def pids(self) -> dict[str, int]:
        """Return the process ids of the children started so far."""
        while not self._received.empty():
            self.seen.append(self._received.get())
        return {event["me"]: event["pid"] for event in self.seen if event["event"] == "born"}

    def end(self) -> tuple[int, str, str]:
        """Wait for the supervisor's end; return its exit status, stdout and stderr."""
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stdout, stderr

    def close(self) -> None:
        """Kill the supervisor and remove its files."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._events_path)
        self._listener_thread.join()
        self._events.close()
        Path(self._events_path).unlink(missing_ok=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """Yield a world and close it."""
    held = World(folder)
    try:
        yield held
    finally:
        held.close()


def is_readable(descriptor: int, within_s: float) -> bool:
    """Return True if there is something to read in time. For any descriptor: ``select`` is limited to 1024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, within_s)))


def wait_gone(pids: list[int], within_s: float = DEADLINE_S) -> None:
    """Wait until all these processes have ended."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone = is_readable(descriptor, deadline - time.monotonic())
        finally:
            os.close(descriptor)
        assert gone, f"process {pid} still runs"


def kill(pid: int) -> None:
    """Send SIGKILL."""
    os.kill(pid, signal.SIGKILL)
