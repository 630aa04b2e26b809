"""`kill -9` under load: all clients get the bytes of an undisturbed run, and no request leaks.

Real servers with dozens of streams. `bench.chaos` measures the delays.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest
from bench.chaos.streams import (
    Disconnect,
    Run,
    StreamRequest,
    StreamResult,
    differences,
    random_requests,
    run_requests,
    stream_request,
)

from tests.processes.server import Server, route, serve, wait_until

KINDS = {"mock": ("--executor", "mock", "--step-ms", "4"), "model": ()}
COMMON = ("--max-model-len", "1024", "--frontends", "2", "--max-restarts", "1000", "--stall-timeout", "2")


@pytest.fixture(scope="module")
def num_streams(request: pytest.FixtureRequest) -> int:
    """Number of concurrent streams at the time of a kill."""
    return 64 if request.config.option.whole else 24


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, num_streams: int) -> Iterator[Server]:
    """Server with little KV memory, so that requests are preempted."""
    with serve(*KINDS[request.param], *little_memory(request.param, num_streams), *COMMON) as server:
        yield server
        server.await_metrics()
        assert_empty(server)


def little_memory(kind: str, num_streams: int) -> tuple[str, str]:
    """Return a KV cache of a third of the streams' tokens, at least of one request of maximum length."""
    return "--kv-cache-memory", f"{max(num_streams, 32) // (16 if kind == 'mock' else 8)}MiB"


@pytest.fixture(scope="module")
def requests(num_streams: int) -> list[StreamRequest]:
    return random_requests(1, num_streams, (40, 100))


@pytest.fixture(scope="module")
def reference(server: Server, requests: list[StreamRequest]) -> Run:
    run = asyncio.run(run_requests(server.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in run.results)
    return run


def kill(server: Server, role: str, number: signal.Signals = signal.SIGKILL, index: int = 0) -> None:
    """Wait for a process and send it a signal."""
    title = f"quintet-{role}-{index}"

    def is_sent() -> bool:
        child = server.children().get(title)
        if child is None:
            return False
        try:
            child.send_signal(number)
        except psutil.NoSuchProcess:  # it is exiting after an earlier signal
            return False
        return True

    wait_until(is_sent, title)


def assert_same(server: Server, reference: Run, run: Run, requests: list[StreamRequest]) -> None:
    """Check that all clients have the same bytes, and that the server is idle afterwards."""
    assert not differences(reference, run, requests)
    for result in run.results:
        assert result.is_done
        assert all(choice.num_endings == 1 for choice in result.choices.values())
    assert_empty(server)


def assert_empty(server: Server) -> None:
    """Wait until no process has an active request."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "live_requests")

    def is_idle() -> bool:
        try:
            return all(server.gauge(f"quintet:{name}") == 0 for name in names)
        except (AssertionError, OSError):  # a new process has no metrics yet
            return False

    wait_until(is_idle, "an idle server")


@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "core", "executor", "frontend"])
def test_killed_process_keeps_all_bytes(
    server: Server, requests: list[StreamRequest], reference: Run, role: str
) -> None:
    async def disturb() -> None:
        kill(server, role)

    run = asyncio.run(run_requests(server.url, requests, disturb))
    assert_same(server, reference, run, requests)


def test_killed_router_keeps_all_bytes(server: Server, requests: list[StreamRequest], reference: Run) -> None:
    """One of two routers: clients resume at the other. With two servers: `tests.chaos.test_route`.

    On a busy machine, all streams may end before the kill. So there are several tries.
    """
    assert any(_resumed_at_another_router(server, requests, reference) for _ in range(4)), (
        "no stream was resumed"
    )


def _resumed_at_another_router(server: Server, requests: list[StreamRequest], reference: Run) -> bool:
    """Kill a router among streams, and check their bytes. Return whether a stream was resumed."""
    flags = ("--engine", server.url, "--poll-interval", "0.2")
    with route(*flags) as one, route(*flags) as other:

        async def disturb() -> None:
            one.process.kill()

        def is_due(started: set[int]) -> bool:
            return any(number % 2 == 0 for number in started)

        run = asyncio.run(run_requests(one.url, requests, disturb, [other.url], is_due))
    assert_same(server, reference, run, requests)
    return any(result.num_connections > result.num_sent == 1 for result in run.results)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "core", "executor"])
def test_stalled_process_is_replaced_and_keeps_all_bytes(
    server: Server, requests: list[StreamRequest], reference: Run, role: str
) -> None:
    async def disturb() -> None:
        kill(server, role, signal.SIGSTOP)

    run = asyncio.run(run_requests(server.url, requests, disturb))
    assert_same(server, reference, run, requests)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", ["tokenizer", "detokenizer", "core", "executor"])
@pytest.mark.parametrize("second", ["core", "executor"])
def test_two_simultaneous_kills(
    server: Server, requests: list[StreamRequest], reference: Run, first: str, second: str
) -> None:
    async def disturb() -> None:
        kill(server, first)
        if second != first:
            kill(server, second)

    run = asyncio.run(run_requests(server.url, requests, disturb))
    assert_same(server, reference, run, requests)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("num_kills", [5, pytest.param(20, marks=pytest.mark.whole)])
@pytest.mark.whole
def test_repeated_kills(server: Server, num_streams: int, num_kills: int) -> None:
    """Random order and delays. Only the core knows a stream without a connection: core and frontend are not both killed."""
    rng = random.Random(1)
    requests = random_requests(1, num_streams, (100, 200))
    reference = asyncio.run(run_requests(server.url, requests))
    left = num_kills

    def random_kills() -> Callable[[], Awaitable[None]]:
        async def disturb() -> None:
            nonlocal left
            roles = ["tokenizer", "detokenizer", "executor", rng.choice(["core", "frontend"])]
            for _ in range(rng.randint(2, 5)):
                kill(server, rng.choice(roles))
                left -= 1
                await asyncio.sleep(rng.choice([0.0, 0.05, 0.3]))

        return disturb

    while left > 0:
        run = asyncio.run(run_requests(server.url, requests, random_kills()))
        assert_same(server, reference, run, requests)


@pytest.mark.drawn(1)
def test_repeated_disconnects_lose_no_token(server: Server, num_streams: int) -> None:
    """Clients resume at another frontend or before the old connection is closed; no token is sampled twice."""
    requests = random_requests(5, num_streams, plain=True)
    reference = asyncio.run(run_requests(server.url, requests))
    server.await_metrics()
    assert_empty(server)
    drawn = server.gauge("quintet:generation_tokens_total")
    rng = random.Random(5)

    async def cut_off(each: StreamRequest, result: StreamResult) -> None:
        left = rng.randint(1, 20)

        def on_event() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = rng.randint(1, 60)
                raise Disconnect

        await stream_request(server.url, each, result, on_event)

    async def all_of_them() -> list[StreamResult]:
        results = [StreamResult() for _ in requests]
        await asyncio.gather(*(cut_off(each, result) for each, result in zip(requests, results, strict=True)))
        return results

    run = Run(asyncio.run(all_of_them()), 0.0)
    assert_same(server, reference, run, requests)
    assert sum(result.num_connections for result in run.results) >= 2 * num_streams
    expected = sum(result.usage["completion_tokens"] for result in run.results)
    wait_until(
        lambda: server.gauge("quintet:generation_tokens_total") - drawn >= expected, "the metrics of the core"
    )
    assert server.gauge("quintet:generation_tokens_total") - drawn == expected
