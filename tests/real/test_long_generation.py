"""SmolLM2 generates 8,000 tokens twice at once, in different batches, and the core is killed meanwhile: the same bytes."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.real.models import MODELS

FILE = MODELS["smollm2"].path
PROMPT = "Once upon a time, in a village by the sea, there"
NUM_TOKENS = 8000
LEAD = 800
"""Tokens that the first generation has before the second begins."""
KILLED_AT = 4000
TIMEOUT_S = 300
SHORT = [f"The {thing} is" for thing in ("sea", "bread", "music", "train", "cheese", "mountain")]

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is missing; `make real-models` downloads it"),
]


class Generated(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(FILE), "--kv-cache-memory", "640MiB") as server:
        yield server


def generate(server: Server, salt: str, reached: dict[int, threading.Event]) -> Generated:
    """Stream a greedy generation. salt: keeps its KV blocks apart; reached: set after so many tokens."""
    where = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": salt,
        "stream": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    found = Generated([], [], "", "")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line[6:])
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            found.token_ids.extend(choice.get("token_ids") or [])
            found.logprobs.extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
            text, reason = found.text + choice["text"], choice["finish_reason"] or found.finish_reason
            found = found._replace(text=text, finish_reason=reason)
        for count, event in reached.items():
            if len(found.token_ids) >= count:
                event.set()
    connection.close()
    return found


def short(server: Server, prompt: str) -> None:
    status, told = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 64, "ignore_eos": True})
    assert status == 200, told


def test_8000_tokens_depend_neither_on_the_batch_nor_on_a_death_of_the_core(server: Server) -> None:
    """The second generation is LEAD tokens behind the first: no step has both at one position, nor is one alone where the
    other is. The core dies while both run, so either is computed again from another token on."""
    ahead, halfway = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2 + len(SHORT)) as pool:
        first = pool.submit(generate, server, "first", {LEAD: ahead, KILLED_AT: halfway})
        assert ahead.wait(TIMEOUT_S)
        second = pool.submit(generate, server, "second", {})
        beside = [pool.submit(short, server, prompt) for prompt in SHORT]
        assert halfway.wait(TIMEOUT_S)
        server.children()["quintet-core-0"].kill()
        wait_until(lambda: server.get("/readyz")[0] == 200, "the server is whole again")
        assert not first.done() and not second.done()
        beside += [pool.submit(short, server, prompt) for prompt in SHORT]
        one, other = first.result(TIMEOUT_S), second.result(TIMEOUT_S)
        for each in beside:
            each.result(TIMEOUT_S)
    assert one.finish_reason == "length" and len(one.token_ids) == NUM_TOKENS
    assert one.token_ids == other.token_ids
    assert one.logprobs == other.logprobs
    assert one.text.encode() == other.text.encode()
