"""`kill -9` of one rank of an executor, with one engine and two: all ranks restart, all responses stay the same."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest
from bench.chaos.streams import random_requests, run_requests

from tests.chaos.test_kills import COMMON, assert_empty, assert_same, kill, little_memory
from tests.processes.server import Server, serve, wait_until

RANK = "executor-0-rank"
"""Title prefix of ranks except rank 0."""


pytestmark = pytest.mark.whole
"""`tests.executor.distributed.test_rank_processes` kills ranks without a server."""


LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 2)]


@pytest.fixture(scope="module", params=LAYOUTS, ids="{0[0]}x{0[1]}, context {0[2]}".format)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Server with ranks of one stage, of two stages, of both, or with decode context parallelism."""
    size, stages, context_size = map(str, request.param)
    ranks = ("--tensor-parallel-size", size, "--pipeline-parallel-size", stages, "--threads", "1")
    ranks += ("--decode-context-parallel-size", context_size)
    with serve(*little_memory("model", 8), *COMMON, *ranks) as server:
        yield server


def test_killed_rank_keeps_all_bytes(server: Server) -> None:
    requests = random_requests(1, 6, (20, 40))
    reference = asyncio.run(run_requests(server.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)

    async def disturb() -> None:
        kill(server, RANK, index=1)

    assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
    assert any("rank 1 was killed by SIGKILL" in line for line in server.lines)


def test_kills_of_first_last_and_random_ranks(server: Server) -> None:
    """Rank 0, which is the executor process, the last rank, then random ranks during restarts."""
    requests = random_requests(2, 16, (60, 120))
    reference = asyncio.run(run_requests(server.url, requests))
    last = max(int(title.rpartition("-")[2]) for title in server.children() if RANK in title)
    rng = random.Random(5)

    async def first() -> None:
        kill(server, "executor")

    async def last_rank() -> None:
        kill(server, RANK, index=last)

    async def many() -> None:
        for _ in range(4):
            rank = rng.randint(0, last)
            kill(server, RANK if rank else "executor", index=rank)
            await asyncio.sleep(rng.choice([0.0, 0.5, 1.5]))

    for disturb in (first, last_rank, many):
        assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)


def test_stalled_rank_is_replaced(server: Server) -> None:
    requests = random_requests(3, 8, (40, 60))
    reference = asyncio.run(run_requests(server.url, requests))

    async def disturb() -> None:
        kill(server, RANK, signal.SIGSTOP, index=1)

    assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)


def test_ranks_end_with_rank_0(server: Server) -> None:
    before = {title: child.pid for title, child in server.children().items() if RANK in title}
    kill(server, "executor")

    def all_are_new() -> bool:
        now = {title: child.pid for title, child in server.children().items() if RANK in title}
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_until(all_are_new, "ranks of a new executor")


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids="{0[0]}x{0[1]}".format)
def engines(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Server with two engines, each of two ranks or two stages."""
    size, stages = map(str, request.param)
    ranks = ("--tensor-parallel-size", size, "--pipeline-parallel-size", stages, "--threads", "1")
    with serve(*little_memory("model", 16), *COMMON, *ranks, "--data-parallel-size", "2") as server:
        yield server
        server.await_metrics()
        assert_empty(server)


@pytest.mark.parametrize("index", [0, 1])
def test_killed_rank_of_one_of_two_engines(engines: Server, index: int) -> None:
    """The other engine resumes the requests."""
    requests = random_requests(4, 16, (40, 100))
    reference = asyncio.run(run_requests(engines.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)
    title, num_resumed = f"executor-{index}-rank", engines.gauge("quintet:resumed_requests_total")

    async def disturb() -> None:
        kill(engines, title, index=1)

    assert_same(engines, reference, asyncio.run(run_requests(engines.url, requests, disturb)), requests)
    assert engines.gauge("quintet:resumed_requests_total") > num_resumed
    wait_until(lambda: f"quintet-{title}-1" in engines.children(), "another rank")


def test_kills_of_ranks_of_both_engines(engines: Server) -> None:
    """One rank of each engine, then random ranks during restarts."""
    rng = random.Random(6)
    requests = random_requests(5, 24, (60, 120))
    reference = asyncio.run(run_requests(engines.url, requests))

    def kill_rank(index: int, rank: int) -> None:
        title, number = (f"executor-{index}-rank", 1) if rank else ("executor", index)
        kill(engines, title, index=number)

    async def both() -> None:
        kill_rank(0, 1)
        kill_rank(1, 0)

    async def many() -> None:
        for _ in range(6):
            kill_rank(rng.randint(0, 1), rng.randint(0, 1))
            await asyncio.sleep(rng.choice([0.0, 0.5, 1.5]))

    for disturb in (both, many):
        assert_same(engines, reference, asyncio.run(run_requests(engines.url, requests, disturb)), requests)
