"""Request deadlines of clients: the ``timeout`` field and the header."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quintet.frontend.api.openai.parse import DEADLINE_HEADER
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Cancel, Failed, Submit

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": USER}])
def test_the_stricter_deadline_of_field_and_header_is_submitted(shared: Any, body: dict[str, Any]) -> None:
    path = C if "prompt" in body else H
    for timeout, header, expected_s in [
        (None, "2500", 2.5),
        (4, None, 4),
        (4, "2500", 2.5),
        (1.5, "2500", 1.5),
    ]:
        headers = {} if header is None else {DEADLINE_HEADER: header}
        request = {**body, "max_tokens": 1, "timeout": timeout}
        assert shared.ask("POST", path, request, headers).status == 200
        submit = shared.engine.wait_for(Submit)[-1]
        assert submit.spec.deadline_ns - submit.spec.arrival_ns == expected_s * 1e9
    assert shared.ask("POST", path, {**body, "max_tokens": 1}).status == 200
    assert shared.engine.wait_for(Submit)[-1].spec.deadline_ns == 0


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", "9" * 13, "\u0662"])
def test_an_invalid_deadline_header_is_a_400(shared: Any, value: str) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as connection:
        body = b'{"prompt":"x"}'
        head = f"POST {C} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{DEADLINE_HEADER}: {value}\r\n"
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        with connection.makefile("rb") as reader:
            answer = reader.read()
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b"whole number of milliseconds" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_misses_its_deadline_before_output_is_a_504(
    serve: Callable[..., Any], stream: bool
) -> None:
    server = serve()
    server.engine.held = True
    answer = server.ask("POST", C, {"prompt": "x", "timeout": 0.05, "stream": stream})
    assert answer.status == 504
    assert answer.json["error"]["type"] == "GatewayTimeoutError"
    assert "0.05 s" in answer.json["error"]["message"]
    submit = server.engine.wait_for(Submit)[0]
    assert server.engine.wait_for(Cancel)[0].request_ids == [submit.request_id]
    assert server.call(lambda: server.service.requests.num_live) == 0


def test_a_started_stream_ends_with_an_error_at_its_deadline(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.silent_after = 3
    answer = server.ask("POST", C, {"prompt": "x", "timeout": 0.5, "stream": True, "max_tokens": 100})
    assert answer.status == 200
    assert answer.events[0]["choices"][0]["text"] == " t0"
    error = answer.events[-1]["error"]
    assert error["code"] == "504"
    assert "output tokens so far: " in error["message"]


def test_a_core_rejection_is_a_429_with_retry_after(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.held = True
    body = {"prompt": "x", "timeout": 5}

    def refuse() -> None:
        submit = server.engine.wait_for(Submit)[0]
        words = "The first token would miss the deadline."
        failed = Failed(submit.request_id, ErrorCode.OVERLOADED, words, None, 17)
        server.call(server.engine.deliver, failed)

    refusing = threading.Thread(target=refuse)
    refusing.start()
    answer = server.ask("POST", C, body)
    refusing.join()
    assert (answer.status, answer.headers["retry-after"]) == (429, "17")
    assert "miss the deadline" in answer.json["error"]["message"]
