"""`kill -9` under a load of embeddings: every response arrives, with the bits of an undisturbed server."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.test_kills import COMMON, assert_empty, kill
from tests.processes.server import Server, serve

pytestmark = pytest.mark.whole
"""Random traces of `tests.core` lose executors and cores with pooling requests, without a server."""

FLAGS = (*COMMON, "--runner", "pooling", "--kv-cache-memory", "12MiB")
ROLES = ("tokenizer", "detokenizer", "core", "executor")
NUM_CLIENTS = 6


def batches(count: int) -> list[list[str]]:
    """Return inputs of requests: some short texts, some of several hundred tokens."""
    draw = random.Random(3)
    words = ["river", "stone", "quick", "seven", "cloud", "letter"]
    return [
        [" ".join(draw.choices(words, k=draw.choice([1, 5, 40, 200]))) for _ in range(draw.randint(1, 6))]
        for _ in range(count)
    ]


def vectors(server: Server, inputs: list[str]) -> Any:
    status, answer = server.post("/v1/embeddings", {"input": inputs})
    assert status == 200, answer
    return [each["embedding"] for each in answer["data"]]


def test_kills_keep_all_vectors() -> None:
    asked = batches(60)
    with serve(*FLAGS) as server, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        expected = list(clients.map(lambda inputs: vectors(server, inputs), asked))
        for role in 2 * ROLES:
            timer = threading.Timer(0.1, kill, (server, role))
            timer.start()
            found = list(clients.map(lambda inputs: vectors(server, inputs), asked))
            timer.join()
            assert found == expected, role
        server.await_metrics()
        assert_empty(server)
