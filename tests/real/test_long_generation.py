"""SmolLM2 generates 8,000 tokens in a batch with a kill of the core: bits of a prefill of these tokens."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.real.models import MODELS
from tests.real.scores import of_server, tokens_of

FILE = MODELS["smollm2"].path
PROMPT = "Once upon a time, in a village by the sea, there"
NUM_TOKENS = 8000
KILL_AT_TOKEN = 4000
TIMEOUT_S = 300
SHORT = [f"The {thing} is" for thing in ("sea", "bread", "music", "train", "cheese", "mountain")]

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is missing; `make real-models` downloads it"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(FILE), "--kv-cache-memory", "512MiB") as server:
        yield server


def generate(
    server: Server, prompt: Sequence[int], halfway: threading.Event
) -> tuple[list[int], list[float]]:
    """Stream a greedy generation; return its tokens and their log-probabilities. halfway: set after KILL_AT_TOKEN tokens."""
    where = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
    body = {
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    token_ids: list[int] = []
    logprobs: list[float] = []
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line[6:])
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            token_ids.extend(choice.get("token_ids") or [])
            logprobs.extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
        if len(token_ids) >= KILL_AT_TOKEN:
            halfway.set()
    connection.close()
    return token_ids, logprobs


def short(server: Server, prompt: str) -> None:
    status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 64, "ignore_eos": True})
    assert status == 200, answer


def test_8000_decoded_tokens_equal_their_prefill(server: Server) -> None:
    """Decode in changing batches, recompute after the kill, then compare with a prefill in long chunks."""
    prompt, halfway = tokens_of(server, PROMPT), threading.Event()
    with ThreadPoolExecutor(1 + 2 * len(SHORT)) as pool:
        running = pool.submit(generate, server, prompt, halfway)
        others = [pool.submit(short, server, text) for text in SHORT]
        assert halfway.wait(TIMEOUT_S)
        server.children()["quintet-core-0"].kill()
        wait_until(lambda: server.get("/readyz")[0] == 200, "readiness")
        assert not running.done(), "the generation ended before the kill"
        others += [pool.submit(short, server, text) for text in SHORT]
        token_ids, logprobs = running.result(TIMEOUT_S)
        for each in others:
            each.result(TIMEOUT_S)
    assert len(token_ids) == NUM_TOKENS
    prefilled = of_server(server, prompt + token_ids)
    decoded = slice(len(prompt) - 1, None)
    assert logprobs == prefilled.own[decoded].tolist()
    assert prefilled.own[decoded].tolist() == prefilled.best[decoded].tolist(), (
        "a token is not the most likely one"
    )
