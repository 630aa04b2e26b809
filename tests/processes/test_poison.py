"""A request that makes the executor fail, as its client sees it; `tests.chaos.test_poison` is about everybody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintet.executor.main import MAX_FAILURES_ALONE

from .poison import Effect, poison
from .server import Server, serve, wait_until

MOCK = ("--executor", "mock", "--max-model-len", "1024", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*MOCK, program="tests.processes.poison") as server:
        yield server


def ask(server: Server, prompt: list[int], **options: object) -> tuple[int, str]:
    """Complete a prompt of ids; return the status, and the error's message or the text."""
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True} | options
    status, answer = server.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def test_what_was_raised_is_told_and_the_next_is_refused_unseen(server: Server) -> None:
    executor = server.children()["quintet-executor-0"].pid
    status, message = ask(server, poison(Effect.RAISES))
    assert status == 422 and "ValueError: poison at work" in message
    wait_until(lambda: server.gauge("quintet:executor_losses_total") == 1, "the figures of the core")
    status, message = ask(server, poison(Effect.RAISES), seed=99)
    assert status == 422 and "so this one was rejected" in message
    assert ask(server, [60, 61, 62])[0] == 200
    assert server.gauge("quintet:executor_losses_total") == 1
    assert server.children()["quintet-executor-0"].pid == executor


def test_a_request_that_ends_the_executor_alone(server: Server) -> None:
    status, message = ask(server, poison(Effect.DIES, 3))
    assert status == 422 and "died 3 times" in message
    assert ask(server, [60, 61, 62])[0] == 200


def test_an_executor_of_which_every_step_raises_is_replaced() -> None:
    """Its requests are blamed at first; after too many of them in a row it is the executor."""
    with serve(*MOCK, program="tests.processes.poison") as server:
        statuses = [ask(server, poison(Effect.RAISES_FOR_ALL))[0]]
        statuses += [ask(server, [60 + number, 61, 62])[0] for number in range(MAX_FAILURES_ALONE + 1)]
        assert statuses == [422] * (MAX_FAILURES_ALONE - 1) + [200] * 3
