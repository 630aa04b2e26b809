"""Deaths during boot: fatal only for a slot that was never ready, and not after /readyz returned 200."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.supervisor.supervised import Event, World, kill, make_config, wait_gone, world

SECOND_ENGINE_HANGS = {"executor-1.1": {"never_ready": True}}
"""The server can answer with engine 0; it boots until executor 1 is ready or replaced."""
EXECUTORS_HANG = {"executor-0.1": {"never_ready": True}, "executor-1.1": {"never_ready": True}}
FIRST = [f"{role}-0" for role in ("executor", "core", "tokenizer", "detokenizer", "frontend")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as held:
        yield held


def start(server: World, script: dict[str, dict[str, object]], **processes: object) -> None:
    """Start two engines and two frontends."""
    server.start(script, make_config(server.run_dir, engines=2, frontends=2, **processes))


def await_ready(server: World, *names: str) -> None:
    """Wait for one topology with all these processes ready."""
    server.expect("topology", lambda event: all(event["slots"].get(name) == "READY" for name in names))


def await_open(server: World) -> None:
    """Wait until one engine and both frontends are ready, and the second executor is running."""
    await_ready(server, *(f"{name}.1" for name in FIRST), "core-1.1", "frontend-1.1")
    if "executor-1.1" not in server.pids():
        server.expect("born", lambda event: event["me"] == "executor-1.1")


def replaced(name: str) -> str:
    return f"{name}.2"


def stop(server: World) -> str:
    """Check that the server drains and exits with 0; return its log."""
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    status, _, log = server.end()
    assert status == 0, log
    return log


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FIRST)
def test_death_during_boot_of_another_engine_is_replaced(server: World, name: str) -> None:
    start(server, SECOND_ENGINE_HANGS)
    await_open(server)
    kill(server.pids()[f"{name}.1"])
    await_ready(server, replaced(name))
    kill(server.pids()["executor-1.1"])
    server.expect("all_ready")
    stop(server)


def test_never_ready_process_is_replaced_while_serving(server: World) -> None:
    start(server, SECOND_ENGINE_HANGS)
    await_open(server)
    kill(server.pids()["executor-1.1"])
    server.expect("all_ready")
    assert "executor-1.2" in server.pids()
    assert "executor-1.1 died" in stop(server)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", FIRST[1:])
def test_death_of_ready_process_is_replaced_before_any_engine_is_ready(server: World, name: str) -> None:
    start(server, EXECUTORS_HANG)
    await_ready(server, f"{name}.1")
    kill(server.pids()[f"{name}.1"])
    await_ready(server, replaced(name))
    assert server.process is not None and server.process.poll() is None


@pytest.mark.parametrize("name", ["executor-1", "core-1"])
def test_death_before_first_readiness_is_fatal_without_ready_engine(server: World, name: str) -> None:
    start(server, {**EXECUTORS_HANG, "core-1.1": {"never_ready": True}})
    await_ready(server, "core-0.1", "frontend-0.1")
    while f"{name}.1" not in server.pids():
        server.expect("born")
    kill(server.pids()[f"{name}.1"])
    status, _, log = server.end()
    assert status == 1
    role, index = name.split("-")
    assert f"quintet: {role} {index}: the process was killed by SIGKILL" in log
    wait_gone(list(server.pids().values()))


def test_never_ready_process_ends_with_its_cause(server: World) -> None:
    start(
        server,
        {"executor-1": {"fail": "no such tensor"}, "executor-1.1": {"never_ready": True, "fail": None}},
    )
    await_open(server)
    kill(server.pids()["executor-1.1"])
    status, _, log = server.end()
    assert status == 1
    assert "executor-1.3" in server.pids(), "the process was restarted"
    assert re.search(r"quintet: executor 1: died \d+ times and was never ready.*no such tensor", log)


def test_configuration_error_is_fatal_while_serving(server: World) -> None:
    start(server, {**SECOND_ENGINE_HANGS, "executor-1.2": {"config_error": "no such device"}})
    await_open(server)
    kill(server.pids()["executor-1.1"])
    status, _, log = server.end()
    assert status == 78
    assert "quintet: executor 1: no such device" in log


def test_late_process_is_logged_while_serving(server: World) -> None:
    start(server, SECOND_ENGINE_HANGS, boot_timeout_s=4.0)
    status, _, log = server.end()
    assert status == 1
    assert "quintet: executor-1.1: not ready within 4 s" in log


def test_silent_process_is_replaced_during_boot_of_another_engine(server: World) -> None:
    start(server, {**SECOND_ENGINE_HANGS, "core-0.1": {"silent": True}}, stall_s=2.0)
    await_ready(server, "core-0.2")
    kill(server.pids()["executor-1.1"])
    server.expect("all_ready")
    assert "core-0.1: no heartbeat" in stop(server)


def test_signal_drains_while_serving(server: World) -> None:
    start(server, SECOND_ENGINE_HANGS)
    await_open(server)
    stop(server)
    drained = {event["me"] for event in server.seen if event["event"] == "drain"}
    drained |= {_next_drain(server)["me"] for _ in range(2 - len(drained))}
    assert drained == {"frontend-0.1", "frontend-1.1"}
    wait_gone(list(server.pids().values()))


def _next_drain(server: World) -> Event:
    return server.expect("drain")


def test_each_role_is_reported_once_as_ready(server: World) -> None:
    start(server, SECOND_ENGINE_HANGS)
    await_open(server)
    kill(server.pids()["core-1.1"])
    await_ready(server, "core-1.2")
    kill(server.pids()["executor-1.1"])
    server.expect("all_ready")
    reported = [event["role"] for event in server.seen if event["event"] == "role_ready"]
    assert sorted(reported) == sorted(name.removesuffix("-0") for name in FIRST)
