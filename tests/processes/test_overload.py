"""Overload of real processes: admission limits, deadlines and slow clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.processes.server import Server, serve, wait_until

C = "/v1/completions"
STEP_S = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(
        "--executor", "mock", "--step-ms", str(1000 * STEP_S), "--max-num-seqs", "2",
        "--max-queued-requests", "40", "--max-queued-tokens", "5000", "--header-timeout", "1",
    ) as server:  # fmt: skip
        yield server


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def ask(server: Server, fields: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
    """POST a completion; return status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", C, json.dumps(fields), {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def is_idle(server: Server) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "live_requests")
    return all(server.gauge(f"quintet:{name}") == 0 for name in names)


def test_stream_past_its_deadline_is_aborted(server: Server) -> None:
    status, _, answer = ask(server, body(1000, stream=True, timeout=1.5))
    assert status == 200
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert json.loads(events[-1])["error"]["code"] == "504"
    assert 2 <= len(events) <= 1.5 / STEP_S + 2  # at most one event per token, and the error
    wait_until(lambda: is_idle(server), "an idle server")


def test_requests_that_would_miss_their_deadline_are_rejected(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, server, body(60)) for _ in range(8)]  # four rounds of 1.2 seconds
        # Six wait for 1.2 s, four for 2.4 s: a late report of the core shows four, and the remaining wait is the same.
        wait_until(lambda: server.gauge("quintet:num_requests_waiting") >= 4, "a queue")
        status, headers, answer = ask(server, body(5, timeout=1.0))
        assert status == 429, answer  # a request that reaches its deadline gets 504
        assert 1 <= int(headers["retry-after"]) <= 60
        assert "would miss its deadline" in json.loads(answer)["error"]["message"]
        assert ask(server, body(5), **{"x-request-deadline-ms": "1000"})[0] == 429
        late_deadline = pool.submit(ask, server, body(5, timeout=25.0))
        assert [future.result()[0] for future in running] == [200] * 8
        assert late_deadline.result()[0] == 200
    wait_until(lambda: is_idle(server), "an idle server")
    assert server.gauge("quintet:admission_rejections_total") == 2


def test_queued_requests_and_tokens_are_limited(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        host = urlsplit(server.url).netloc
        for _ in range(2):
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(host)))
            connection.request("POST", C, json.dumps(body(2000)), {"content-type": "application/json"})
        wait_until(lambda: server.gauge("quintet:num_requests_running") == 2, "two running requests")
        status, headers, answer = ask(server, body(1500))
        assert (status, "--max-queued-tokens" in answer.decode()) == (429, True)
        assert 1 <= int(headers["retry-after"]) <= 60
        status, headers, answer = ask(server, body(1, n=39, temperature=1.0))
        assert (status, "--max-queued-requests" in answer.decode()) == (429, True)
        assert ask(server, body(1, n=41, temperature=1.0))[0] == 400
    wait_until(lambda: is_idle(server), "an idle server")


def test_silent_and_slow_connections_block_no_request(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    url = urlsplit(server.url)
    assert url.hostname is not None and url.port is not None
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=30))
            for _ in range(1000)
        ]
        for client in clients[:500]:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        began_s = time.monotonic()
        assert ask(server, body(10))[0] == 200
        assert time.monotonic() - began_s < 20.0, "blocked by silent connections"
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 408 ")
        assert ask(server, body(10))[0] == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
