"""A real server whose model transformers computes: its executor is killed, and nobody reads that in the answers."""

from __future__ import annotations

import threading
from typing import Any

from .server import Server, serve, wait_until

PROMPTS = ("One thing to know about rivers", "A list of", "Once")


def request(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}


def ask(server: Server, prompt: str) -> str:
    status, answer = server.post("/v1/completions", request(prompt))
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def test_answers_outlive_the_executor() -> None:
    flags = ("--model-impl", "transformers", "--dtype", "float32", "--max-model-len", "256", "--threads", "1")
    with serve(*flags) as server:
        alone = {prompt: ask(server, prompt) for prompt in PROMPTS}
        together: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda prompt=prompt: together.update({prompt: ask(server, prompt)}))
            for prompt in PROMPTS
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.gauge("quintet:num_requests_running") > 0, "a request that runs")
        server.children()["quintet-executor-0"].kill()
        for thread in threads:
            thread.join()
        assert together == alone
        assert server.stop() == 0
    assert any("by transformers in float32" in line for line in server.lines), server.lines
