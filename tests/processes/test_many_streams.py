"""500 concurrent streams with random disconnects: all blocks are freed."""

import asyncio
import json
import random

from tests.processes.server import Server, serve, wait_until

NUM_STREAMS = 500


async def one_stream(host: str, port: int, rng: random.Random, outcomes: list[str]) -> None:
    """Stream one completion; some clients disconnect early."""
    max_events = rng.choice([None, None, 0, 1, 3, 10])
    body = json.dumps(
        {
            "prompt": "storm " * rng.randint(1, 40),
            "max_tokens": rng.randint(1, 48),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "temperature": 0.8,
            "stop": rng.choice([[], ["e"], ["zz"]]),
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    events = 0
    try:
        while True:
            if max_events is not None and events >= max_events:
                outcomes.append("disconnected")
                return
            line = await asyncio.wait_for(reader.readline(), 120)
            assert line, "the server closed an unfinished stream"
            if line.startswith(b"HTTP/1.1"):
                assert b" 200 " in line, line
            elif line.startswith(b"data: [DONE]"):
                outcomes.append("done")
                return
            elif line.startswith(b"data: "):
                assert b'"error"' not in line, line
                events += 1
    finally:
        writer.close()


async def run_streams(server: Server) -> list[str]:
    host, port = server.url.removeprefix("http://").split(":")
    rng = random.Random(20)
    outcomes: list[str] = []
    await asyncio.gather(*(one_stream(host, int(port), rng, outcomes) for _ in range(NUM_STREAMS)))
    return outcomes


def test_aborted_streams_free_all_blocks() -> None:
    with serve(
        "--executor", "mock", "--step-ms", "1", "--max-model-len", "1024", "--kv-cache-memory", "8MiB",
        "--max-num-seqs", "64", "--tokenizers", "2", "--detokenizers", "2",
    ) as server:  # fmt: skip
        outcomes = asyncio.run(run_streams(server))
        assert len(outcomes) == NUM_STREAMS
        assert outcomes.count("done") > 100
        assert outcomes.count("disconnected") > 100
        wait_until(
            lambda: (
                server.gauge("quintet:num_requests_running") == 0
                and server.gauge("quintet:num_requests_waiting") == 0
                and server.gauge("quintet:kv_cache_usage_perc") == 0
                and server.gauge("quintet:live_requests") == 0
            ),
            "an idle server",
        )
        assert server.post("/v1/completions", {"prompt": "calm", "max_tokens": 3})[0] == 200
