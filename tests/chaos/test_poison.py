"""Poison requests among others: each poison request gets an error; the others get the bytes of an undisturbed run.

Real servers with the default restart limit. The executor's worker fails on request (`tests.processes.poison`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from math import ceil, log2

import pytest
from bench.chaos.streams import Run, StreamRequest, differences, random_requests, run_requests

from quintet.core.poison_isolation import DEATHS_ALONE
from tests.processes.poison import Effect, poison
from tests.processes.server import Server, serve, wait_until

from .test_kills import assert_empty, little_memory, num_streams

__all__ = ["num_streams"]

KINDS = {"mock": ("--executor", "mock", "--step-ms", "2"), "model": ()}


@contextlib.contextmanager
def serve_poisoned(kind: str, num_streams: int) -> Iterator[Server]:
    """Run a server with little KV memory, so that requests are preempted."""
    flags = (*KINDS[kind], *little_memory(kind, num_streams), "--max-model-len", "1024")
    with serve(*flags, program="tests.processes.poison") as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, num_streams: int) -> Iterator[Server]:
    with serve_poisoned(request.param, num_streams) as server:
        yield server


def poisoned(effect: Effect, after: int, **options: object) -> StreamRequest:
    """Return a streamed request that makes the executor fail after `after` outputs."""
    body = {"prompt": poison(effect, after), "max_tokens": 100, "stream": True, "ignore_eos": True, "seed": 3}
    return StreamRequest("/v1/completions", body | options)


def play_with(server: Server, requests: list[StreamRequest], poisons: dict[int, StreamRequest]) -> Run:
    """Play requests with poison at the given indices; check the errors and return the run of the others."""
    mixed = list(requests)
    for index, each in sorted(poisons.items()):
        mixed.insert(index, each)
    run = asyncio.run(run_requests(server.url, mixed))
    for index in poisons:
        result = run.results[index]
        error = json.loads(result.error)
        # A whole body before the first byte, else an event.
        assert error.get("error", error)["code"] == "422", result.error
        assert not any(choice.num_endings for choice in result.choices.values())
    return Run([result for index, result in enumerate(run.results) if index not in poisons], run.duration_s)


@pytest.mark.parametrize(
    ("server", "effect"),
    [
        ("mock", Effect.DIES),
        ("model", Effect.RAISES),
        pytest.param("mock", Effect.RAISES, marks=pytest.mark.whole),
        pytest.param("model", Effect.DIES, marks=pytest.mark.whole),  # ten starts with torch
    ],
    indirect=["server"],
)
def test_one_poison_request_among_many(server: Server, num_streams: int, effect: Effect) -> None:
    requests = random_requests(2, num_streams - 1, (30, 60))
    reference = asyncio.run(run_requests(server.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)
    run = play_with(server, requests, {num_streams // 2: poisoned(effect, 12)})
    assert not differences(reference, run, requests)
    assert_empty(server)
    wait_until(lambda: server.gauge("quintet:poison_requests_total") == 1, "the metrics of the core")
    num_losses = server.gauge("quintet:executor_losses_total")
    assert num_losses <= ceil(log2(3 * num_streams)) + (DEATHS_ALONE if effect is Effect.DIES else 1)


def test_several_poison_requests_repeated(num_streams: int) -> None:
    with serve_poisoned("mock", num_streams) as server:
        requests = random_requests(3, num_streams - 4, (30, 60))
        reference = asyncio.run(run_requests(server.url, requests))
        poisons = {
            0: poisoned(Effect.RAISES, 0, n=2),
            num_streams // 3: poisoned(Effect.RAISES, 12),
            num_streams // 3 + 1: poisoned(Effect.RAISES, 12),
            num_streams - 1: poisoned(Effect.RAISES, 20, n=3),
        }
        assert not differences(reference, play_with(server, requests, poisons), requests)
        wait_until(lambda: server.gauge("quintet:poison_requests_total") == 4, "the metrics of the core")
        num_losses = server.gauge("quintet:executor_losses_total")
        again = play_with(server, requests, poisons)
        assert not differences(reference, again, requests)
        assert server.gauge("quintet:executor_losses_total") == num_losses  # rejected on arrival
        assert_empty(server)
