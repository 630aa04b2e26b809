"""Requests that make the executor fail, in a crowd: each gets its error, and everybody else the bytes of a calm run.

Real servers with the default restarts; only the executor's worker is made to fail (`tests.processes.poison`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from math import ceil, log2

import pytest
from bench.chaos.streams import Asked, Run, crowd, differences, play

from quintet.core.poison_isolation.suspects import DEATHS_ALONE
from tests.processes.poison import Effect, poison
from tests.processes.server import Server, serve, wait_until

from .test_kills import assert_empty, little_memory, num_streams

__all__ = ["num_streams"]

KINDS = {"mock": ("--executor", "mock", "--step-ms", "2"), "model": ()}


@contextlib.contextmanager
def serve_poisoned(kind: str, num_streams: int) -> Iterator[Server]:
    """Run a server with so little KV memory that requests push each other out."""
    flags = (*KINDS[kind], *little_memory(kind, num_streams), "--max-model-len", "1024")
    with serve(*flags, program="tests.processes.poison") as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, num_streams: int) -> Iterator[Server]:
    with serve_poisoned(request.param, num_streams) as server:
        yield server


def poisoned(effect: Effect, after: int, **options: object) -> Asked:
    """Return a streamed request that makes the executor fail after so many outputs."""
    body = {"prompt": poison(effect, after), "max_tokens": 100, "stream": True, "ignore_eos": True, "seed": 3}
    return Asked("/v1/completions", body | options)


def play_with(server: Server, asked: list[Asked], poisons: dict[int, Asked]) -> Run:
    """Play a crowd with poison at some places; check each one's error, and return the run of the others."""
    mixed = list(asked)
    for place, each in sorted(poisons.items()):
        mixed.insert(place, each)
    run = asyncio.run(play(server.url, mixed))
    for place in poisons:
        heard = run.heard[place]
        error = json.loads(heard.error)
        assert error.get("error", error)["code"] == 422, (
            heard.error
        )  # whole before the first byte, else an event
        assert not any(choice.num_endings for choice in heard.choices.values())
    return Run([heard for place, heard in enumerate(run.heard) if place not in poisons], run.duration_s)


@pytest.mark.parametrize(
    ("server", "effect"),
    [
        ("mock", Effect.DIES),
        ("model", Effect.RAISES),
        pytest.param("mock", Effect.RAISES, marks=pytest.mark.whole),
        pytest.param("model", Effect.DIES, marks=pytest.mark.whole),  # ten boots with torch
    ],
    indirect=["server"],
)
def test_one_among_many(server: Server, num_streams: int, effect: Effect) -> None:
    asked = crowd(2, num_streams - 1, (30, 60))
    calm = asyncio.run(play(server.url, asked))
    assert all(heard.status == 200 and heard.is_done and not heard.error for heard in calm.heard)
    run = play_with(server, asked, {num_streams // 2: poisoned(effect, 12)})
    assert not differences(calm, run, asked)
    assert_empty(server)
    wait_until(lambda: server.gauge("quintet:poison_requests_total") == 1, "the figures of the core")
    num_losses = server.gauge("quintet:executor_losses_total")
    assert num_losses <= ceil(log2(3 * num_streams)) + (DEATHS_ALONE if effect is Effect.DIES else 1)


def test_several_at_once_and_again(num_streams: int) -> None:
    with serve_poisoned("mock", num_streams) as server:
        asked = crowd(3, num_streams - 4, (30, 60))
        calm = asyncio.run(play(server.url, asked))
        poisons = {
            0: poisoned(Effect.RAISES, 0, n=2),
            num_streams // 3: poisoned(Effect.RAISES, 12),
            num_streams // 3 + 1: poisoned(Effect.RAISES, 12),
            num_streams - 1: poisoned(Effect.RAISES, 20, n=3),
        }
        assert not differences(calm, play_with(server, asked, poisons), asked)
        wait_until(lambda: server.gauge("quintet:poison_requests_total") == 7, "the figures of the core")
        num_losses = server.gauge("quintet:executor_losses_total")
        again = play_with(server, asked, poisons)
        assert not differences(calm, again, asked)
        assert server.gauge("quintet:executor_losses_total") == num_losses  # refused unseen
        assert_empty(server)
