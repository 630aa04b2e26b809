"""Responses to poison requests; `tests.chaos.test_poison` tests the other requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintet.executor.loop import MAX_FAILURES_ALONE

from .poison import Effect, poison
from .server import Server, serve, wait_until

MOCK = ("--executor", "mock", "--max-model-len", "1024", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*MOCK, program="tests.processes.poison") as server:
        yield server


def ask(server: Server, prompt: list[int], **options: object) -> tuple[int, str]:
    """Complete a prompt of ids; return the status, and the error message or the text."""
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True} | options
    status, answer = server.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def test_exception_is_reported_and_the_next_copy_is_rejected(server: Server) -> None:
    executor = server.children()["quintet-executor-0"].pid
    status, message = ask(server, poison(Effect.RAISES))
    assert status == 422 and "ValueError: poison at work" in message
    wait_until(lambda: server.gauge("quintet:executor_losses_total") == 1, "the metrics of the core")
    status, message = ask(server, poison(Effect.RAISES), seed=99)
    assert status == 422 and "so this one was rejected" in message
    assert ask(server, [60, 61, 62])[0] == 200
    assert server.gauge("quintet:executor_losses_total") == 1
    assert server.children()["quintet-executor-0"].pid == executor


def test_request_that_kills_the_executor_is_rejected(server: Server) -> None:
    status, message = ask(server, poison(Effect.DIES, 3))
    assert status == 422 and "died 3 times" in message
    assert ask(server, [60, 61, 62])[0] == 200


def test_executor_that_always_raises_is_replaced() -> None:
    """The first requests are rejected as poison; after too many in a row the executor is replaced."""
    with serve(*MOCK, program="tests.processes.poison") as server:
        statuses = [ask(server, poison(Effect.RAISES_FOR_ALL))[0]]
        statuses += [ask(server, [60 + number, 61, 62])[0] for number in range(MAX_FAILURES_ALONE + 1)]
        assert statuses == [422] * (MAX_FAILURES_ALONE - 1) + [200] * 3
