"""A real server with KV on disk: killed and started again, it begins behind what it had computed, and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.server import Server, serve, wait_until

PROMPT = "The river runs under the bridge, " * 40


def ask(server: Server) -> tuple[str, int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    usage: dict[str, Any] = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def blocks(server: Server, event: str) -> int:
    _, figures = server.get("/metrics")
    return sum(
        int(float(line.split()[-1]))
        for line in figures.splitlines()
        if line.startswith("quintet:kv_disk_blocks_total{") and f'event="{event}"' in line
    )


def outlives(folder: Path, *more: str) -> None:
    """Check that a server which is killed leaves a prompt, and that one which loses its executor goes on."""
    flags = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit", *more)
    flags = (*flags, "--kv-disk", str(folder / "kv"), "--kv-disk-size", "8MiB")
    with serve(*flags) as server:
        first = ask(server)
        assert first[1] == 0
        num_full = ask(server)[1] // 16
        assert num_full > 5
        wait_until(lambda: blocks(server, "stored") >= num_full, "all of the prompt on disk")
        server.process.kill()
    with serve(*flags) as server:
        text, num_cached = ask(server)
        assert (text, num_cached) == (first[0], num_full * 16)
        server.children()["quintet-executor-0"].kill()
        assert ask(server)[0] == text
        assert server.stop() == 0


@pytest.mark.whole
def test_a_prompt_outlives_the_server(tmp_path: Path) -> None:
    outlives(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("size", "stages"), [("2", "1"), ("1", "2"), ("2", "2")])
def test_a_prompt_outlives_ranks(size: str, stages: str, tmp_path: Path) -> None:
    """What lies in several processes; in the fast suite `tests.models.kv.test_kv_ranks` has them as threads."""
    outlives(tmp_path, "--tensor-parallel-size", size, "--pipeline-parallel-size", stages)
