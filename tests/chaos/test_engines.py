"""`kill -9` of one of two engines: the other resumes its requests to the same bytes. Delays: `bench.chaos.stalls`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from bench.chaos.streams import random_requests, run_requests

from tests.chaos.test_kills import COMMON, KINDS, assert_empty, assert_same, kill, little_memory
from tests.processes.server import Server, serve

ENGINES = ("--data-parallel-size", "2")


@pytest.fixture(scope="module", params=["mock", pytest.param("model", marks=pytest.mark.whole)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(*KINDS[request.param], *little_memory(request.param, 24), *COMMON, *ENGINES) as server:
        yield server
        server.await_metrics()
        assert_empty(server)


def test_engine_kill_keeps_all_bytes(server: Server) -> None:
    """Kill the executor of one, then the core of the other: requests move in both directions."""
    requests = random_requests(1, 16, (40, 100))
    reference = asyncio.run(run_requests(server.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)

    async def disturb() -> None:
        kill(server, "executor", index=0)
        kill(server, "core", index=1)

    assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)


@pytest.mark.whole
@pytest.mark.parametrize("role", ["executor", "core"])
@pytest.mark.parametrize("index", [0, 1])
def test_kill_of_each_process_of_an_engine(server: Server, role: str, index: int) -> None:
    requests = random_requests(2, 24, (40, 100))
    reference = asyncio.run(run_requests(server.url, requests))
    num_resumed = server.gauge("quintet:resumed_requests_total")

    async def disturb() -> None:
        kill(server, role, index=index)

    assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
    assert server.gauge("quintet:resumed_requests_total") > num_resumed


@pytest.mark.whole
def test_repeated_kills_of_both_engines(server: Server) -> None:
    rng = random.Random(3)
    requests = random_requests(3, 32, (100, 200))
    reference = asyncio.run(run_requests(server.url, requests))

    async def disturb() -> None:
        for _ in range(8):
            role = rng.choice(["executor", "executor", "core", "tokenizer", "detokenizer"])
            index = rng.randint(0, 1) if role in ("executor", "core") else 0
            kill(server, role, index=index)
            await asyncio.sleep(rng.choice([0.0, 0.1, 0.5]))

    for _ in range(2):
        assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
