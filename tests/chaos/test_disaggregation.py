"""`kill -9` of prefill and decode servers during KV transfers: all responses stay the same."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.chaos.test_kills import kill
from tests.chaos.throttled_proxy import ThrottledProxy
from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import (
    BODY,
    FLAGS,
    complete_disaggregated,
    free_port,
    num_cached_tokens,
)

pytestmark = pytest.mark.whole
"""Missing server: `tests.processes.test_disaggregation`. Exit during a transfer: `tests.executor.kv_transfer.test_kv_peer`."""

NUM_PROMPTS = 8
SAMPLING = {"max_tokens": 40, "seed": 7, "temperature": 0.8}
HANDSHAKE_BYTES = 4 << 10
"""The handshake and less than one block."""
PARTIAL_BYTES = 400 << 10


def prompt_of(number: int) -> str:
    return f"Chapter {number}. " + "The river runs under the bridge, " * (20 + number)


def answer_of(server: Server, number: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    body = BODY | SAMPLING | {"prompt": prompt_of(number), "kv_transfer_params": params}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    whole: dict[str, Any] = answer
    return whole


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def prefill_all(prefill: Server, numbers: range, port: int) -> dict[int, dict[str, Any]]:
    """Prefill the prompts; return their ``kv_transfer_params`` with the port of a proxy."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    found = {}
    for number in numbers:
        body = BODY | {"prompt": prompt_of(number), "max_tokens": 1, "kv_transfer_params": params}
        status, answer = prefill.post("/v1/completions", body)
        assert status == 200, answer
        found[number] = answer["kv_transfer_params"] | {"remote_port": port}
    return found


def send_all(
    clients: ThreadPoolExecutor, server: Server, params: dict[int, dict[str, Any]], proxy: ThrottledProxy
) -> dict[int, Future[dict[str, Any]]]:
    """Send all decode requests; return once the proxy has passed its limit of KV."""
    futures = {number: clients.submit(answer_of, server, number, param) for number, param in params.items()}
    assert proxy.is_full.wait(30), "no KV was transferred"
    return futures


def transfer_failed(decode: Server, proxy: ThrottledProxy) -> bool:
    """Return True if the decode server logged a failed transfer through this proxy."""
    words = f"127.0.0.1:{proxy.port} closed the connection: "
    return any(words in line and "blocks will be computed" in line for line in decode.lines)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("role", ["executor", "core"])
def test_kill_during_a_kv_transfer(side: str, role: str) -> None:
    port = free_port()
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
    ):
        for first, num_bytes in enumerate((HANDSHAKE_BYTES, PARTIAL_BYTES)):
            numbers = range(first * NUM_PROMPTS, (first + 1) * NUM_PROMPTS)
            reference = {number: text_of(answer_of(prefill, number)) for number in numbers}
            with ThrottledProxy(port, num_bytes) as proxy:
                futures = send_all(clients, decode, prefill_all(prefill, numbers, proxy.port), proxy)
                kill(prefill if side == "prefill" else decode, role)
                if role == "executor":
                    proxy.cut()
                else:  # the executor, which transfers KV, is alive
                    proxy.unthrottle()
                assert {number: text_of(each.result()) for number, each in futures.items()} == reference
            if (side, role) == ("prefill", "executor"):
                assert transfer_failed(decode, proxy)
            for server in (prefill, decode):
                wait_until(lambda server=server: server.get("/readyz")[0] == 200, "readiness")  # type: ignore[misc]
        number = 2 * NUM_PROMPTS
        with ThrottledProxy(port, 1 << 30) as proxy:
            [params] = prefill_all(prefill, range(number, number + 1), proxy.port).values()
            answer = answer_of(decode, number, params)
            assert num_cached_tokens(answer) > 0 and text_of(answer) == text_of(answer_of(prefill, number))


def test_prefill_server_is_killed() -> None:
    port, numbers = free_port(), range(NUM_PROMPTS)
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
        ThrottledProxy(port, PARTIAL_BYTES) as proxy,
    ):
        reference = {number: text_of(answer_of(prefill, number)) for number in numbers}
        futures = send_all(clients, decode, prefill_all(prefill, numbers, proxy.port), proxy)
        prefill.process.kill()
        proxy.cut()
        assert {number: text_of(each.result()) for number, each in futures.items()} == reference
        assert transfer_failed(decode, proxy)


def test_decode_server_is_killed() -> None:
    """Clients lose their connections and resend to another decode server, which fetches the same KV."""
    port, numbers = free_port(), range(NUM_PROMPTS)
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", f"127.0.0.1:{port}") as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        serve(*FLAGS, "--role", "decode") as other,
        ThreadPoolExecutor(NUM_PROMPTS) as clients,
        ThrottledProxy(port, PARTIAL_BYTES) as proxy,
    ):
        reference = {number: text_of(answer_of(prefill, number)) for number in numbers}
        params = prefill_all(prefill, numbers, proxy.port)
        futures = send_all(clients, decode, params, proxy)
        decode.process.kill()
        proxy.cut()
        for each in futures.values():
            with pytest.raises(OSError):  # the connection
                each.result()
        again = {number: answer_of(other, number, params[number]) for number in numbers}
        assert {number: text_of(answer) for number, answer in again.items()} == reference
        assert all(num_cached_tokens(answer) > 0 for answer in again.values())


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("role", ["executor", "core"])
def test_kill_with_requests_at_all_stages(side: str, role: str) -> None:
    """Kill after the first response, with requests at both servers and between them."""
    listen = f"127.0.0.1:{free_port()}"
    with (
        serve(*FLAGS, "--role", "prefill", "--kv-peer-listen", listen) as prefill,
        serve(*FLAGS, "--role", "decode") as decode,
        ThreadPoolExecutor(8) as clients,
    ):
        victim = prefill if side == "prefill" else decode
        for turn in range(3):
            numbers = range(turn * 16, (turn + 1) * 16)
            reference = [text_of(answer_of(prefill, number)) for number in numbers]
            futures = [
                clients.submit(complete_disaggregated, prefill, decode, prompt=prompt_of(number), **SAMPLING)
                for number in numbers
            ]
            wait(futures, return_when=FIRST_COMPLETED)
            kill(victim, role)
            assert [text_of(each.result()) for each in futures] == reference
            wait_until(lambda: victim.get("/readyz")[0] == 200, "readiness")
