"""`kill -9` during the boot of two engines, of one rank or two, with one executor stopped in a boot phase.

Before an engine is ready, only the death of a booting process ends the server. Once an engine serves, no death does.
`tests.deploy.supervisor.test_boot_deaths` tests these rules without a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator

import psutil
import pytest
from bench.chaos.streams import Run, StreamRequest, random_requests, run_requests

from tests.chaos.test_kills import COMMON, KINDS, assert_same, kill, little_memory
from tests.processes.server import Server, serve, wait_until

BOOTING = (*COMMON, "--data-parallel-size", "2", "--stall-timeout", "10")
LAYOUTS = {
    "one rank": (*KINDS["mock"], *little_memory("mock", 24)),
    "two ranks": (*little_memory("model", 24), "--tensor-parallel-size", "2", "--threads", "1"),
}
PHASES = {"spawned": "", "named": "quintet-"}
"""Phase -> title prefix of the stopped process: any, or set once it has its configuration."""
READY_ROLES = ("core", "tokenizer", "detokenizer", "frontend")

whole = pytest.mark.whole
layouts = pytest.mark.parametrize("layout", ["one rank", pytest.param("two ranks", marks=whole)])


@pytest.fixture(scope="module")
def requests() -> list[StreamRequest]:
    return random_requests(7, 12, (40, 80))


def executor_processes(server: Server, index: int, title: str = "") -> list[psutil.Process]:
    """Return the processes of all ranks of one executor. title: required prefix, if not empty."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            line = " ".join(words)
            is_named = line.startswith(f"quintet-executor-{index}")
            is_program = any("quintet.executor." in word for word in words) and f"--index {index}" in line
            is_spawned = is_program or (index == 0 and line.startswith("quintet-executor-early"))
            if is_named or (is_spawned and not title):
                found.append(child)
    return found


def suspend(server: Server, index: int, phase: str) -> None:
    """Stop all processes of one executor once it is in this phase."""
    wait_until(lambda: bool(executor_processes(server, index, PHASES[phase])), f"executor {index} {phase}")
    for process in executor_processes(server, index):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)


def resume(server: Server, index: int) -> None:
    """Continue the stopped processes of one executor."""
    for process in executor_processes(server, index):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def await_address(server: Server) -> None:
    """Set the URL from the listening socket, which exists before the ready line."""

    def is_listening() -> bool:
        for connection in psutil.Process(server.process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                server.url = f"http://127.0.0.1:{connection.laddr.port}"
        return bool(server.url)

    wait_until(is_listening, "a listening socket")


def await_state(server: Server, role: str, index: int, state: str = "ready", epoch: int = 1) -> None:
    """Wait until the supervisor reports this state for a process of at least this epoch."""

    def is_reported() -> bool:
        with contextlib.suppress(OSError):
            return any(
                (each["role"], each["index"], each["state"]) == (role, index, state)
                and each["epoch"] >= epoch
                for each in json.loads(server.get("/health?verbose")[1]).get("all_processes", [])
            )
        return False

    wait_until(is_reported, f"{role} {index} {state}")


def await_serving(server: Server) -> None:
    def is_serving() -> bool:
        with contextlib.suppress(OSError):
            return server.get("/readyz")[0] == 200
        return False

    wait_until(is_serving, "/readyz 200", 60.0)


def await_boot(server: Server) -> None:
    """Wait for the ready line of the server."""
    wait_until(lambda: any("Quintet is ready" in line for line in server.lines), "all processes ready", 60.0)


@contextlib.contextmanager
def booting(layout: str, suspended: tuple[int, ...], phase: str) -> Iterator[Server]:
    """Start a server and stop these executors in this phase."""
    with serve(*LAYOUTS[layout], *BOOTING, wait_ready=False) as server:
        try:
            for index in suspended:
                suspend(server, index, phase)
            await_address(server)
            yield server
        finally:
            if server.process.poll() is None:
                for index in suspended:
                    resume(server, index)


@layouts
@pytest.mark.drawn(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "victim", ["executor-0", *(f"{role}-0" for role in READY_ROLES), "core-1", "frontend-1", "executor-1"]
)
def test_streams_survive_a_kill_during_the_boot_of_another_engine(
    requests: list[StreamRequest], layout: str, phase: str, victim: str
) -> None:
    with booting(layout, (1,), phase) as server:
        await_serving(server)
        role, _, index = victim.partition("-")
        if victim != "executor-1":
            await_state(server, role, int(index))

        async def disturb() -> None:
            if victim == "executor-1":
                executor_processes(server, 1)[0].kill()
            else:
                kill(server, role, index=int(index))

        disturbed = asyncio.run(run_requests(server.url, requests, disturb))
        resume(server, 1)
        await_boot(server)
        reference = asyncio.run(run_requests(server.url, requests))
        assert_undisturbed(server, reference, disturbed, requests)


def assert_undisturbed(server: Server, reference: Run, disturbed: Run, requests: list[StreamRequest]) -> None:
    assert all(result.status == 200 and not result.error for result in reference.results)
    assert_same(server, reference, disturbed, requests)


@whole
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [0, 1])
def test_streams_survive_a_kill_of_a_booting_rank(
    requests: list[StreamRequest], phase: str, number: int
) -> None:
    with booting("two ranks", (1,), phase) as server:
        await_serving(server)
        resume(server, 1)  # rank 0 starts the other ranks and was stopped

        async def disturb() -> None:
            ranks = executor_processes(server, 1)
            ranks[min(number, len(ranks) - 1)].kill()

        disturbed = asyncio.run(run_requests(server.url, requests, disturb))
        await_boot(server)
        assert_undisturbed(server, asyncio.run(run_requests(server.url, requests)), disturbed, requests)


@layouts
@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", READY_ROLES)
def test_ready_process_is_replaced_before_an_engine_is_ready(layout: str, role: str) -> None:
    with booting(layout, (0, 1), "spawned") as server:
        await_state(server, role, 0)
        kill(server, role)
        await_state(server, role, 0, epoch=2)
        assert server.get("/readyz")[0] == 503
        for index in (0, 1):
            resume(server, index)
        await_boot(server)
        status, answer = server.post("/v1/completions", {"model": "", "prompt": "a", "max_tokens": 2})
        assert status == 200, answer


@layouts
@pytest.mark.drawn(1)
@pytest.mark.parametrize("index", [0, 1])
def test_executor_death_before_an_engine_is_ready_ends_the_server(layout: str, index: int) -> None:
    with booting(layout, (0, 1), "spawned") as server:
        executor_processes(server, index)[0].kill()
        assert server.process.wait(30) == 1
        cause = f"quintet: executor {index}: the process was killed by SIGKILL"
        assert any(cause in line for line in server.lines)
