"""`--model-impl transformers` on a real server: a kill of the executor does not change responses."""

from __future__ import annotations

import asyncio

import pytest
from bench.chaos.streams import Run, StreamRequest, differences, run_requests

from .server import serve

PROMPTS = ("One thing to know about rivers", "A list of", "Once")


def request(prompt: str) -> StreamRequest:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return StreamRequest("/v1/completions", body | {"stream": True, "return_token_ids": True})


@pytest.mark.whole
def test_executor_kill_keeps_responses() -> None:
    flags = ("--model-impl", "transformers", "--dtype", "float32", "--max-model-len", "256", "--threads", "1")
    requests = [request(prompt) for prompt in PROMPTS]
    with serve(*flags) as server:
        sequential = Run([asyncio.run(run_requests(server.url, [each])).results[0] for each in requests], 0.0)
        assert all(result.status == 200 and result.is_done for result in sequential.results)

        async def disturb() -> None:
            server.children()["quintet-executor-0"].kill()

        together = asyncio.run(run_requests(server.url, requests, disturb))
        assert not differences(sequential, together, requests)
        assert server.stop() == 0
    assert any("by transformers in float32" in line for line in server.lines), server.lines
