"""SmolLM2 chats: a long response, 32 concurrent ones, a second turn, and kills of each process."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.real.models import MODELS

FILE = MODELS["smollm2"].path
ROLES = ("tokenizer", "core", "executor", "detokenizer")
NUM_CHATS = 32
NUM_LONG = 2048
QUESTIONS = ("What is {}?", "Tell a story about {}.", "Why do people like {}?", "Name three facts about {}.")
THINGS = ("rain", "bread", "the sea", "music", "mountains", "gravity", "trains", "cheese")
PROMPTS = [question.format(thing) for question in QUESTIONS for thing in THINGS]
MIN_HIT_RATE = 0.95

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is missing; `make real-models` downloads it"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--kv-cache-memory", "512MiB", "--max-restarts", "1000", "--stall-timeout", "2")
    with serve(str(FILE), "--max-model-len", "4096", *flags) as server:
        yield server


def chat(number: int, messages: list[dict[str, str]], max_tokens: int = 48, **more: Any) -> dict[str, Any]:
    return {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "top_p": 0.95,
        "seed": number,
        **more,
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def stream(server: Server, body: dict[str, Any], started: threading.Event | None = None) -> tuple[str, str]:
    """Return a chat's streamed text and its finish reason. ``started``: set at its first text."""
    where = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    text, reason = "", ""
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        if started is not None and text:
            started.set()
    connection.close()
    return text, reason


def crowd(server: Server, started: threading.Event | None = None) -> list[tuple[str, str]]:
    bodies = [chat(number, [user(text)]) for number, text in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: stream(server, body, started), bodies))


@pytest.fixture(scope="module")
def reference(server: Server) -> list[tuple[str, str]]:
    assert len(PROMPTS) == NUM_CHATS
    return crowd(server)


def test_concurrent_chats_equal_sequential_ones(server: Server, reference: list[tuple[str, str]]) -> None:
    assert len({text for text, _ in reference}) == NUM_CHATS
    assert all(text.isprintable() or "\n" in text for text, _ in reference)
    for number in (0, 9, 18, 31):
        assert stream(server, chat(number, [user(PROMPTS[number])])) == reference[number]


@pytest.mark.parametrize("role", ROLES)
def test_killed_process_keeps_all_chats(server: Server, reference: list[tuple[str, str]], role: str) -> None:
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(crowd, server, started)
        assert started.wait(60)
        server.children()[f"quintet-{role}-0"].kill()
        assert running.result(300) == reference
    wait_until(lambda: server.get("/readyz")[0] == 200, "readiness")


def test_long_answer_survives_kills_of_all_processes(server: Server) -> None:
    body = chat(7, [user("Write a very long story about a ship.")], NUM_LONG, ignore_eos=True)
    whole = stream(server, body)
    assert whole[1] == "length"
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, body, started)
        assert started.wait(60)
        for role in ROLES:
            wait_until(lambda role=role: f"quintet-{role}-0" in server.children(), role)  # type: ignore[misc]
            server.children()[f"quintet-{role}-0"].kill()
            wait_until(lambda: server.get("/readyz")[0] == 200, "readiness")
        assert not running.done(), "the answer ended before the last kill"
        assert running.result(300) == whole


def test_second_turn_hits_the_prefix_cache(server: Server) -> None:
    facts = "Remember this. " + " ".join(
        f"Item {number} is {thing}." for number, thing in enumerate(THINGS * 6)
    )
    status, first = server.post("/v1/chat/completions", chat(1, [user(facts)]))
    assert status == 200, first
    message = first["choices"][0]["message"]
    turns = [
        user(facts),
        {"role": "assistant", "content": message["content"]},
        user("Which item is the sea?"),
    ]
    status, second = server.post("/v1/chat/completions", chat(2, turns))
    assert status == 200, second
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= MIN_HIT_RATE * first["usage"]["prompt_tokens"]
