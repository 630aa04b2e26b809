"""Process runtime: heartbeats during computation, and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.process.runtime import SUPERVISOR, HandlerError, Process
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.ids import Role, WorkerId
from quintet.wire.metrics import decode_snapshot
from quintet.wire.supervision import Drain, Heartbeat
from tests.deploy.supervisor.supervised import make_config

ME = WorkerId(Role.EXECUTOR, 0, 1)
DEADLINE_S = 20.0


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Inbox[Heartbeat]]:
    bus = Bus(tmp_path)
    inbox: Inbox[Heartbeat] = Inbox(bus, address_of(tmp_path, SUPERVISOR), Heartbeat)
    yield inbox
    inbox.close()
    bus.close()


def heartbeats_until(inbox: Inbox[Heartbeat], progress: int) -> list[Heartbeat]:
    """Return the heartbeats up to the first with this progress."""
    heartbeats: list[Heartbeat] = []
    deadline = time.monotonic() + DEADLINE_S
    while not heartbeats or heartbeats[-1].progress < progress:
        assert time.monotonic() < deadline, heartbeats
        heartbeats += inbox.wait(1.0)
    return heartbeats


def test_heartbeats_continue_while_the_loop_computes(supervisor: Inbox[Heartbeat], tmp_path: Path) -> None:
    process: Process[Any] = Process(ME, make_config(tmp_path, heartbeat_s=0.02), Drain)
    done = iter(range(1_000_000))
    process.account = lambda: (next(done), 1)
    process.start_heartbeat_thread()
    try:
        heartbeats = heartbeats_until(
            supervisor, progress=5
        )  # this thread, the loop's, receives nothing meanwhile
    finally:
        process.close()
    assert {beat.worker for beat in heartbeats} == {ME}
    assert {beat.pending for beat in heartbeats} == {1}


def test_few_heartbeats_carry_metrics(supervisor: Inbox[Heartbeat], tmp_path: Path) -> None:
    process: Process[Any] = Process(ME, make_config(tmp_path, heartbeat_s=0.02), Drain)
    steps = process.metrics.counter("steps", "Steps.")
    try:
        for _ in range(20):
            steps.inc()
            process.progress += 1
            process.beat()
        heartbeats = heartbeats_until(supervisor, progress=20)
    finally:
        process.close()
    assert sum(1 for beat in heartbeats if beat.metrics) < 10
    assert heartbeats[0].metrics


def test_final_metrics_are_sent_at_exit(supervisor: Inbox[Heartbeat], tmp_path: Path) -> None:
    process: Process[Any] = Process(ME, make_config(tmp_path, heartbeat_s=1000.0), Drain)
    steps = process.metrics.counter("steps", "Steps.")
    process.beat()
    steps.inc(3)
    process.close()
    heartbeats: list[Heartbeat] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(heartbeats) < 2:
        assert time.monotonic() < deadline, heartbeats
        heartbeats += supervisor.wait(1.0)
    step_counters = [
        series for series in decode_snapshot(heartbeats[-1].metrics).counters if series.name == "steps"
    ]
    assert [series.value for series in step_counters] == [3]


def test_loop_separates_errors_of_message_handlers_from_others(tmp_path: Path) -> None:
    """Only the former end a process."""

    async def scenario() -> list[Exception]:
        loop, bus = asyncio.get_running_loop(), Bus(tmp_path)
        process: Process[Any] = Process(ME, make_config(tmp_path, heartbeat_s=1000.0), Drain)
        peers, errors = Peers(bus), asyncio.Queue[Exception]()
        loop.set_exception_handler(lambda _, context: errors.put_nowait(context["exception"]))
        loop.call_soon(lambda: 1 // 0)
        process.attach(loop, lambda message: message.missing)
        peers.connect(ME, address_of(tmp_path, ME))
        peers.send(ME.role, ME.index, Drain())
        try:
            return [await asyncio.wait_for(errors.get(), DEADLINE_S) for _ in range(2)]
        finally:
            loop.remove_reader(process.inbox.fileno())
            peers.close()
            process.close()
            bus.close()

    other, own = asyncio.run(scenario())
    assert type(other) is ZeroDivisionError
    assert isinstance(own, HandlerError) and isinstance(own.__cause__, AttributeError)
