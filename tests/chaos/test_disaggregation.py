"""`kill -9` of who computes prompts, and of who computes answers, while KV is on its way: the same bytes for every client."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.chaos.test_kills import kill
from tests.chaos.throttled_proxy import Narrows
from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import (
    BODY,
    FLAGS,
    complete_disaggregated,
    free_port,
    num_cached_tokens,
)

pytestmark = pytest.mark.whole
"""An absent server: `tests.processes.test_disaggregation`; one that exits during a transfer:
`tests.executor.kv_transfer.test_kv_peer`."""

NUM_PROMPTS = 8
ASKED_OF_ALL = {"max_tokens": 40, "seed": 7, "temperature": 0.8}
FIRST_WORDS = 4 << 10
"""Bytes: the two have greeted each other, and not one block is whole."""
SOME_BLOCKS = 400 << 10


def prompt_of(number: int) -> str:
    return f"Chapter {number}. " + "The river runs under the bridge, " * (20 + number)


def answer_of(server: Server, number: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    body = BODY | ASKED_OF_ALL | {"prompt": prompt_of(number), "kv_transfer_params": params}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    whole: dict[str, Any] = answer
    return whole


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def prompts_at(prefill: Server, numbers: range, port: int) -> dict[int, dict[str, Any]]:
    """Have prompts computed; return what who answers is to be sent of each, with another way to their KV."""
    offering = {"do_remote_decode": True, "do_remote_prefill": False}
    found = {}
    for number in numbers:
        body = BODY | {"prompt": prompt_of(number), "max_tokens": 1, "kv_transfer_params": offering}
        status, answer = prefill.post("/v1/completions", body)
        assert status == 200, answer
        found[number] = answer["kv_transfer_params"] | {"remote_port": port}
    return found


def ask_all(
    clients: ThreadPoolExecutor, server: Server, params: dict[int, dict[str, Any]], way: Narrows
) -> dict[int, Future[dict[str, Any]]]:
    """Ask for all answers at once, and return once some of the KV has come and some is still on its way."""
    asked = {number: clients.submit(answer_of, server, number, of_it) for number, of_it in params.items()}
    assert way.is_full.wait(30), "no KV comes"
    return asked


def was_given_up(decode: Server, way: Narrows) -> bool:
    """Whether blocks that were to come this way did not."""
    words = f"127.0.0.1:{way.port} closed the connection: "
    return any(words in line and "blocks will be computed" in line for line in decode.lines)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("role", ["executor", "core"])
def test_killed_while_kv_is_on_its_way(side: str, role: str) -> None:
    port = free_port()
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
    ):
        for first, num_bytes in enumerate((FIRST_WORDS, SOME_BLOCKS)):
            numbers = range(first * NUM_PROMPTS, (first + 1) * NUM_PROMPTS)
            calm = {number: text_of(answer_of(prefill, number)) for number in numbers}
            with Narrows(port, num_bytes) as way:
                asked = ask_all(clients, decode, prompts_at(prefill, numbers, way.port), way)
                kill(prefill if side == "prefill" else decode, role)
                if role == "executor":
                    way.cut()
                else:  # who talks of KV lives
                    way.widen()
                assert {number: text_of(each.result()) for number, each in asked.items()} == calm
            if (side, role) == ("prefill", "executor"):
                assert was_given_up(decode, way)
            for server in (prefill, decode):
                wait_until(lambda server=server: server.get("/readyz")[0] == 200, "everybody again")  # type: ignore[misc]
        number = 2 * NUM_PROMPTS
        with Narrows(port, 1 << 30) as way:
            [params] = prompts_at(prefill, range(number, number + 1), way.port).values()
            answer = answer_of(decode, number, params)
            assert num_cached_tokens(answer) > 0 and text_of(answer) == text_of(answer_of(prefill, number))


def test_a_whole_server_that_computed_prompts_is_killed() -> None:
    port, numbers = free_port(), range(NUM_PROMPTS)
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
        Narrows(port, SOME_BLOCKS) as way,
    ):
        calm = {number: text_of(answer_of(prefill, number)) for number in numbers}
        asked = ask_all(clients, decode, prompts_at(prefill, numbers, way.port), way)
        prefill.process.kill()
        way.cut()
        assert {number: text_of(each.result()) for number, each in asked.items()} == calm
        assert was_given_up(decode, way)


def test_a_whole_server_that_was_to_answer_is_killed() -> None:
    """Its clients lose their connections; what they were to send it they send to another, which fetches the same KV."""
    port, numbers = free_port(), range(NUM_PROMPTS)
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        serve(*FLAGS, "--role", "decode") as other,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
        Narrows(port, SOME_BLOCKS) as way,
    ):
        calm = {number: text_of(answer_of(prefill, number)) for number in numbers}
        params = prompts_at(prefill, numbers, way.port)
        asked = ask_all(clients, decode, params, way)
        decode.process.kill()
        way.cut()
        for each in asked.values():
            with pytest.raises(OSError):  # the connection
                each.result()
        again = {number: answer_of(other, number, params[number]) for number in numbers}
        assert {number: text_of(answer) for number, answer in again.items()} == calm
        assert all(num_cached_tokens(answer) > 0 for answer in again.values())


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("role", ["executor", "core"])
def test_killed_while_requests_are_at_every_stage(side: str, role: str) -> None:
    """Some at one server, some at the other, some between them: as soon as the first of them has its answer."""
    listen = f"127.0.0.1:{free_port()}"
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", listen) as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(8) as clients,
    ):
        victim = prefill if side == "prefill" else decode
        for turn in range(3):
            numbers = range(turn * 16, (turn + 1) * 16)
            calm = [text_of(answer_of(prefill, number)) for number in numbers]
            asked = [
                clients.submit(
                    complete_disaggregated, prefill, decode, prompt=prompt_of(number), **ASKED_OF_ALL
                )
                for number in numbers
            ]
            wait(asked, return_when=FIRST_COMPLETED)
            kill(victim, role)
            assert [text_of(each.result()) for each in asked] == calm
            wait_until(lambda: victim.get("/readyz")[0] == 200, "another one")
