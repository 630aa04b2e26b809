"""Thousands of requests, half of them cancelled at random times: no leak, and no stale frame is applied."""

from __future__ import annotations

import asyncio
import json
import random
from urllib.parse import urlsplit

import pytest

from tests.processes.server import Server, serve, wait_until

MAX_CONCURRENT = 256


async def send_one(host: str, port: int, rng: random.Random, outcomes: list[str]) -> None:
    """Send a request; some clients disconnect before, during or after the response."""
    max_events = rng.choice([None, None, 0, 0, 1, 2])
    body = json.dumps(
        {
            "prompt": "leak " * rng.randint(1, 12),
            "max_tokens": rng.randint(1, 8),
            "n": rng.choice([1, 1, 1, 1, 2]),
            "temperature": 0.8,
            "stop": rng.choice([[], [], ["e"]]),
            "stream": rng.random() < 0.7,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    try:
        if max_events == 0 and rng.random() < 0.3:
            writer.write(body[: rng.randint(0, len(body) - 1)])
            outcomes.append("disconnected")
            return
        writer.write(body)
        events = 0
        while line := await asyncio.wait_for(reader.readline(), 120):
            if line.startswith(b"HTTP/1.1"):
                assert b" 200 " in line, line
            events += line.startswith(b"data: ")
            if max_events is not None and events >= max_events:
                outcomes.append("disconnected")
                return
        outcomes.append("done")
    finally:
        writer.close()


async def send_all(server: Server, num_requests: int) -> list[str]:
    where = urlsplit(server.url)
    assert where.hostname is not None and where.port is not None
    rng = random.Random(11)
    outcomes: list[str] = []
    semaphore = asyncio.Semaphore(MAX_CONCURRENT)

    async def limited() -> None:
        async with semaphore:
            await send_one(str(where.hostname), int(where.port or 0), rng, outcomes)

    await asyncio.gather(*(limited() for _ in range(num_requests)))
    return outcomes


@pytest.mark.parametrize("num_requests", [1_000, pytest.param(10_000, marks=pytest.mark.whole)])
def test_cancelled_requests_leak_nothing(num_requests: int) -> None:
    with serve(
        "--executor", "mock", "--max-model-len", "512", "--kv-cache-memory", "2MiB", "--max-num-seqs", "128",
        "--tokenizers", "2", "--detokenizers", "2", "--stream-grace", "1",
    ) as server:  # fmt: skip
        outcomes = asyncio.run(send_all(server, num_requests))
        assert len(outcomes) == num_requests
        assert min(outcomes.count("done"), outcomes.count("disconnected")) > 0.35 * num_requests
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "live_requests")
        gauges += ("detokenizer_open_requests",)
        wait_until(
            lambda: all(server.gauge(f"quintet:{name}") == 0 for name in gauges),
            "an idle server",
        )
        for name in ("request_state_mismatches", "duplicate_endings"):
            assert server.gauge(f"quintet:{name}_total") == 0, name
        assert server.post("/v1/completions", {"prompt": "calm", "max_tokens": 3})[0] == 200
