"""`kill -9` of who computes prompts, and of who computes answers, while KV is on its way: the same bytes for every client."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.processes.test_apart import ASKED, FLAGS, cached, computed_apart, free_port

NUM_PROMPTS = 16
ASKED_OF_ALL = {"max_tokens": 40, "seed": 7, "temperature": 0.8}


def prompt_of(number: int) -> str:
    return f"Chapter {number}. " + "The river runs under the bridge, " * (20 + number)


def answer_of(server: Server, number: int) -> str:
    status, answer = server.post("/v1/completions", ASKED | ASKED_OF_ALL | {"prompt": prompt_of(number)})
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.whole
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("role", ["executor", "core"])
def test_killed_while_kv_is_on_its_way(side: str, role: str) -> None:
    rng = random.Random(f"{side} {role}")
    listen = f"127.0.0.1:{free_port()}"
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", listen) as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(8) as clients,
    ):
        calm = [answer_of(prefill, number) for number in range(NUM_PROMPTS)]

        def ask(number: int) -> tuple[str, int]:
            answer = computed_apart(prefill, decode, prompt=prompt_of(number), **ASKED_OF_ALL)
            return answer["choices"][0]["text"], cached(answer)

        name = f"quintet-{role}-0"
        victim = prefill if side == "prefill" else decode
        for _ in range(3):
            asked = [clients.submit(ask, number) for number in range(NUM_PROMPTS)]
            time.sleep(rng.choice([0.05, 0.3, 1.0]))  # somewhere in the middle
            wait_until(lambda: name in victim.children(), f"{name} is there")
            victim.children()[name].kill()
            assert [each.result()[0] for each in asked] == calm
            wait_until(lambda: victim.get("/readyz")[0] == 200, "another one")
        assert ask(0) == (calm[0], cached(computed_apart(prefill, decode, prompt=prompt_of(0))))
