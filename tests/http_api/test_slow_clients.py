"""Slow and idle clients: timeouts, and no effect on other clients."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quintet.frontend.http import connection as frontend_connection
from quintet.wire import messages

C = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@contextlib.contextmanager
def connected(server: Any) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        yield client


def read_all(client: socket.socket) -> bytes:
    with client.makefile("rb") as reader:
        return reader.read()


@pytest.mark.parametrize("sent", [b"P", HEAD, HEAD + b"x-slow: "])
def test_an_incomplete_head_is_a_408(serve: Callable[..., Any], sent: bytes) -> None:
    server = serve(header_timeout_s=0.05)
    with connected(server) as client:
        client.sendall(sent)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"0.05 s" in answer and b'"TimeoutError"' in answer


def test_partial_reads_do_not_extend_the_header_timeout(serve: Callable[..., Any]) -> None:
    server = serve(header_timeout_s=0.3)
    with connected(server) as client:
        client.sendall(HEAD)
        client.settimeout(0.02)
        answer = b""
        for _ in range(500):  # more than ten seconds of pieces
            client.sendall(b"x: y\r\n")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(4096)
                break
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_the_header_timeout_applies_to_every_request_of_a_connection(serve: Callable[..., Any]) -> None:
    server = serve(header_timeout_s=0.5)
    with connected(server) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"ok"):
            answer += client.recv(4096)
        client.sendall(HEAD)
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_an_answer_longer_than_the_header_timeout_is_not_cut_off(serve: Callable[..., Any]) -> None:
    server = serve(header_timeout_s=0.5)
    server.engine.silent_after = 3
    answer = server.ask("POST", C, {"prompt": "x", "timeout": 1.2, "stream": True, "max_tokens": 100})
    assert answer.events[-1]["error"]["code"] == "504"


def test_the_size_of_headers_is_bounded(serve: Callable[..., Any]) -> None:
    server = serve()
    with connected(server) as client:
        client.sendall(HEAD)
        line = b"x-long: " + b"y" * 4000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(frontend_connection.MAX_HEADER_BYTES // len(line) + 2):
                client.sendall(line)
        with contextlib.suppress(ConnectionError):
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert server.ask("GET", "/livez").status == 200


def test_an_idle_connection_is_closed(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_connection, "IDLE_S", 0.05)
    server = serve()
    with connected(server) as client:
        assert read_all(client) == b""


def test_a_thousand_idle_connections_do_not_delay_a_request(serve: Callable[..., Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends are in this process
    server = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            client = stack.enter_context(connected(server))
            client.sendall(HEAD[:10])
        assert server.ask("POST", C, {"prompt": "x", "max_tokens": 5}).status == 200
        assert len(server._server.server_state.connections) >= 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def completion_request(stream: bool) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": stream}).encode()
    head = f"POST {C} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_answer(serve: Callable[..., Any], stream: bool) -> None:
    server = serve()
    server.engine.held = True
    with connected(server) as client:
        client.sendall(completion_request(stream))
        server.engine.wait_for(messages.Submit)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.call(server.engine.release)
        answer = read_all(client)
    assert b"HTTP/1.1 200 OK\r\n" in answer and b"connection: close" in answer
    assert b" t2" in answer and answer.endswith(b"\r\n0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_of_a_half_closed_connection_is_detected(
    serve: Callable[..., Any], stream: bool
) -> None:
    server = serve()
    server.engine.silent_after = 1
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(completion_request(stream))
    if stream:
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    server.engine.wait_for(messages.Submit)
    client.shutdown(socket.SHUT_WR)
    client.close()
    server.engine.wait_for(messages.Cancel)


def test_a_trickling_body_is_rejected(serve: Callable[..., Any]) -> None:
    server = serve()
    server.service.bodies.progress_s, server.service.bodies.bytes_per_s = 0.1, 1000
    with connected(server) as client:
        client.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        client.settimeout(0.02)
        answer = b""
        for _ in range(500):  # more than ten seconds of pieces, each in time
            client.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(4096)
                break
    assert answer.startswith(b"HTTP/1.1 408 ") and b"too slowly" in answer
    assert server.ask("POST", C, b" " * 900 + b'{"prompt": "x", "max_tokens": 1}').status == 200
