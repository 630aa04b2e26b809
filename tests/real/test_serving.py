"""SmolLM2 serves chats: a long answer, 32 at once, a second turn, and each process killed in between: the same bytes."""

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
ASKED = [question.format(thing) for question in QUESTIONS for thing in THINGS]
LEAST_HIT = 0.95

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


def stream(server: Server, body: dict[str, Any], begun: threading.Event | None = None) -> tuple[str, str]:
    """Return a chat's streamed text and how it ended. ``begun``: set once its first text is there."""
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
        if begun is not None and text:
            begun.set()
    connection.close()
    return text, reason


def crowd(server: Server, begun: threading.Event | None = None) -> list[tuple[str, str]]:
    bodies = [chat(number, [user(text)]) for number, text in enumerate(ASKED)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: stream(server, body, begun), bodies))


@pytest.fixture(scope="module")
def calm(server: Server) -> list[tuple[str, str]]:
    assert len(ASKED) == NUM_CHATS
    return crowd(server)


def test_chats_say_together_what_they_say_alone(server: Server, calm: list[tuple[str, str]]) -> None:
    assert len({text for text, _ in calm}) == NUM_CHATS
    assert all(text.isprintable() or "\n" in text for text, _ in calm)
    for number in (0, 9, 18, 31):
        assert stream(server, chat(number, [user(ASKED[number])])) == calm[number]


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_changes_no_chat(server: Server, calm: list[tuple[str, str]], role: str) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(crowd, server, begun)
        assert begun.wait(60)
        server.children()[f"quintet-{role}-0"].kill()
        assert running.result(300) == calm
    wait_until(lambda: server.get("/readyz")[0] == 200, "the server is whole again")


def test_a_long_answer_outlasts_the_death_of_every_process(server: Server) -> None:
    body = chat(7, [user("Write a very long story about a ship.")], NUM_LONG, ignore_eos=True)
    whole = stream(server, body)
    assert whole[1] == "length"
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, body, begun)
        assert begun.wait(60)
        for role in ROLES:
            wait_until(lambda role=role: f"quintet-{role}-0" in server.children(), role)  # type: ignore[misc]
            server.children()[f"quintet-{role}-0"].kill()
            wait_until(lambda: server.get("/readyz")[0] == 200, "the server is whole again")
        assert not running.done(), "the answer ended before the last death"
        assert running.result(300) == whole


def test_a_second_turn_finds_the_first_one(server: Server) -> None:
    told = "Remember this. " + " ".join(
        f"Item {number} is {thing}." for number, thing in enumerate(THINGS * 6)
    )
    status, first = server.post("/v1/chat/completions", chat(1, [user(told)]))
    assert status == 200, first
    message = first["choices"][0]["message"]
    turns = [user(told), {"role": "assistant", "content": message["content"]}, user("Which item is the sea?")]
    status, second = server.post("/v1/chat/completions", chat(2, turns))
    assert status == 200, second
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= LEAST_HIT * first["usage"]["prompt_tokens"]
