"""Requests by the thousand, half of them given up at random moments: nothing is left, and no stale frame was applied."""

from __future__ import annotations

import asyncio
import json
import random
from urllib.parse import urlsplit

import pytest

from tests.processes.server import Server, serve, wait_until

AT_ONCE = 256


async def one(host: str, port: int, rng: random.Random, endings: list[str]) -> None:
    """Send a request; perhaps hang up before, during or after its answer."""
    patience = rng.choice([None, None, 0, 0, 1, 2])
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
        if patience == 0 and rng.random() < 0.3:
            writer.write(body[: rng.randint(0, len(body) - 1)])
            endings.append("left")
            return
        writer.write(body)
        events = 0
        while line := await asyncio.wait_for(reader.readline(), 120):
            if line.startswith(b"HTTP/1.1"):
                assert b" 200 " in line, line
            events += line.startswith(b"data: ")
            if patience is not None and events >= patience:
                endings.append("left")
                return
        endings.append("done")
    finally:
        writer.close()


async def flood(server: Server, num_requests: int) -> list[str]:
    where = urlsplit(server.url)
    assert where.hostname is not None and where.port is not None
    rng = random.Random(11)
    endings: list[str] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async def gated() -> None:
        async with gate:
            await one(str(where.hostname), int(where.port or 0), rng, endings)

    await asyncio.gather(*(gated() for _ in range(num_requests)))
    return endings


@pytest.mark.parametrize("num_requests", [1_000, pytest.param(10_000, marks=pytest.mark.whole)])
def test_requests_half_of_them_given_up_leave_nothing(num_requests: int) -> None:
    with serve(
        "--executor", "mock", "--max-model-len", "512", "--kv-cache-memory", "2MiB", "--max-num-seqs", "128",
        "--tokenizers", "2", "--detokenizers", "2", "--stream-grace", "1",
    ) as server:  # fmt: skip
        endings = asyncio.run(flood(server, num_requests))
        assert len(endings) == num_requests
        assert min(endings.count("done"), endings.count("left")) > 0.35 * num_requests
        empty = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "live_requests")
        empty += ("detokenizer_open_requests",)
        wait_until(
            lambda: all(server.gauge(f"quintet:{name}") == 0 for name in empty),
            "an empty house",
        )
        for name in ("request_state_mismatches", "duplicate_endings"):
            assert server.gauge(f"quintet:{name}_total") == 0, name
        assert server.post("/v1/completions", {"prompt": "calm", "max_tokens": 3})[0] == 200
