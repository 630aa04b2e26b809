"""`kill -9` under a load of several adapters: every response arrives, with the tokens of an undisturbed server."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quintet.deploy.embedded import default_model_path
from tests.chaos.test_kills import COMMON, assert_empty, kill
from tests.models.lora.random_adapters import RandomAdapter, write_adapter
from tests.processes.server import Server, serve

pytestmark = pytest.mark.whole

ROLES = ("tokenizer", "detokenizer", "core", "executor")
NUM_CLIENTS = 6


def tokens(server: Server, asked: tuple[str, str]) -> Any:
    name, prompt = asked
    body = {"model": name, "prompt": prompt, "max_tokens": 40, "seed": 1, "return_token_ids": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def test_kills_keep_the_adapters(tmp_path: Path) -> None:
    model = Path(default_model_path())
    for seed in (1, 2):
        write_adapter(RandomAdapter(("q_proj", "v_proj", "up_proj"), seed=seed), model, tmp_path / str(seed))
    flags = (*COMMON, "--served-model-name", "base", "--kv-cache-memory", "12MiB")
    for seed in ("1", "2"):
        flags += ("--lora-modules", f"{seed}={tmp_path / seed}")
    draw = random.Random(5)
    prompts = [
        " ".join(draw.choices(["river", "stone", "quick"], k=draw.choice([1, 9, 90]))) for _ in range(20)
    ]
    asked = [(name, prompt) for prompt in prompts for name in ("base", "1", "2")]
    with serve(*flags) as server, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        expected = list(clients.map(lambda each: tokens(server, each), asked))
        assert len({tuple(each) for each in expected[:3]}) == 3
        for role in 2 * ROLES:
            timer = threading.Timer(0.2, kill, (server, role))
            timer.start()
            found = list(clients.map(lambda each: tokens(server, each), asked))
            timer.join()
            assert found == expected, role
        server.await_metrics()
        assert_empty(server)
