"""KV on disk of a real server: after a kill and restart it reuses the blocks and gives the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.server import Server, serve, wait_until

PROMPT = "The river runs under the bridge, " * 40


def ask(server: Server) -> tuple[str, int]:
    """Return the text and the number of cached prompt tokens."""
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    usage: dict[str, Any] = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def num_blocks(server: Server, event: str) -> int:
    _, metrics = server.get("/metrics")
    return sum(
        int(float(line.split()[-1]))
        for line in metrics.splitlines()
        if line.startswith("quintet:kv_disk_blocks_total{") and f'event="{event}"' in line
    )


def check_restart(folder: Path, *more: str) -> None:
    """Check that blocks on disk survive a kill of the server, and of the executor."""
    flags = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit", *more)
    flags = (*flags, "--kv-disk", str(folder / "kv"), "--kv-disk-size", "8MiB")
    with serve(*flags) as server:
        first = ask(server)
        assert first[1] == 0
        num_full = ask(server)[1] // 16
        assert num_full > 5
        wait_until(lambda: num_blocks(server, "stored") >= num_full, "all blocks of the prompt on disk")
        server.process.kill()
    with serve(*flags) as server:
        text, num_cached = ask(server)
        assert (text, num_cached) == (first[0], num_full * 16)
        server.children()["quintet-executor-0"].kill()
        assert ask(server)[0] == text
        assert server.stop() == 0


@pytest.mark.whole
def test_blocks_survive_a_server_kill(tmp_path: Path) -> None:
    check_restart(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("size", "stages"), [("2", "1"), ("1", "2"), ("2", "2")])
def test_blocks_of_ranks_survive_a_server_kill(size: str, stages: str, tmp_path: Path) -> None:
    """Several processes; the fast suite runs ranks as threads in `tests.models.kv.test_kv_ranks`."""
    check_restart(tmp_path, "--tensor-parallel-size", size, "--pipeline-parallel-size", stages)
