"""Shared KV store of real servers and of engines: one reuses the blocks of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import num_cached_tokens

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit")
PROMPT = "The river runs under the bridge, " * 40
CHUNK_TOKENS = 256
"""Number of tokens of a run."""


def ask(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """Return the text and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"], num_cached_tokens(answer)


def num_chunks(server: Server, event: str) -> int:
    server.await_metrics()
    return int(server.gauge_of("quintet:kv_store_chunks_total", event))


@pytest.mark.whole
def test_blocks_of_another_server_are_fetched(tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-store", f"file://{tmp_path}/kv", "--kv-store-size", "16MiB")
    with serve(*flags) as one, serve(*flags) as other:
        text, num_cached = ask(one)
        assert num_cached == 0
        wait_until(lambda: num_chunks(one, "stored") > 0, "the prompt in the store")
        assert ask(other) == (text, CHUNK_TOKENS)
        other.children()["quintet-executor-0"].kill()
        assert ask(other)[0] == text


@pytest.mark.whole
def test_engines_share_blocks_through_the_store(tmp_path: Path) -> None:
    flags = (*FLAGS, "--data-parallel-size", "2", "--routing", "round-robin")
    with serve(*flags, "--kv-store", f"local://{tmp_path}") as server:
        text, num_cached = ask(server)
        assert num_cached == 0
        wait_until(lambda: num_chunks(server, "stored") > 0, "the prompt in the store")
        assert ask(server) == (text, CHUNK_TOKENS), "from the other engine"
