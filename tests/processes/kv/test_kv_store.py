"""Real servers that share a store: one begins behind what another has computed, and says the same; so do engines of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import cached

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit")
PROMPT = "The river runs under the bridge, " * 40
RUN = 256
"""Tokens of a run."""


def ask(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"], cached(answer)


def runs(server: Server, event: str) -> int:
    server.await_figures()
    return int(server.gauge_of("quintet:kv_store_runs_total", event))


@pytest.mark.whole
def test_a_prompt_that_another_server_computed_is_fetched(tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-store", f"file://{tmp_path}/kv", "--kv-store-size", "16MiB")
    with serve(*flags) as one, serve(*flags) as other:
        text, num_cached = ask(one)
        assert num_cached == 0
        wait_until(lambda: runs(one, "kept") > 0, "the prompt in the store")
        assert ask(other) == (text, RUN)
        other.children()["quintet-executor-0"].kill()
        assert ask(other)[0] == text


@pytest.mark.whole
def test_engines_of_one_server_share_what_they_computed(tmp_path: Path) -> None:
    flags = (*FLAGS, "--data-parallel-size", "2", "--routing", "round-robin")
    with serve(*flags, "--kv-store", f"local://{tmp_path}") as server:
        text, num_cached = ask(server)
        assert num_cached == 0
        wait_until(lambda: runs(server, "kept") > 0, "the prompt in the store")
        assert ask(server) == (text, RUN), "at the other engine"
