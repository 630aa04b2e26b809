"""KV swapping to host memory on a real server: the texts are those without memory pressure."""

from __future__ import annotations

import threading
from typing import Any

from tests.processes.server import Server, serve, wait_until

NUM_STREAMS = 6


def request(index: int) -> dict[str, Any]:
    return {"prompt": f"{index} things to know", "max_tokens": 150, "temperature": 0, "ignore_eos": True}


def ask(server: Server, index: int) -> str:
    status, answer = server.post("/v1/completions", request(index))
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def num_swapped(server: Server, direction: str) -> float:
    _, metrics = server.get("/metrics")
    return sum(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("quintet:kv_swap_blocks_total{") and f'direction="{direction}"' in line
    )


def test_swapped_requests_equal_sequential_ones() -> None:
    flags = ("--max-model-len", "256", "--kv-cache-memory", "1MiB", "--threads", "1", "--audit")
    with serve(*flags, "--swap-space", "0.01", "--no-enable-prefix-caching") as server:
        together: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda index=index: together.update({index: ask(server, index)}))
            for index in range(NUM_STREAMS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # metrics arrive with heartbeats
        wait_until(lambda: num_swapped(server, "in") > 0, "a swap in")
        assert num_swapped(server, "out") >= num_swapped(server, "in")
        assert together == {index: ask(server, index) for index in range(NUM_STREAMS)}
        assert server.stop() == 0
    assert any("swap" in line and "blocks at" in line for line in server.lines), server.lines
