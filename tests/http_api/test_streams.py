"""Streams: disconnects, keep-alives, errors after the first token, one write per step, rejection, draining."""

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quintet.frontend.api.openai.answer import AnswerOptions
from quintet.frontend.api.openai.logprobs import completion_logprobs
from quintet.frontend.http import stream_timers
from quintet.wire.codec import pack_i32
from quintet.wire.ids import Role
from quintet.wire.messages import (
    Alternative,
    Cancel,
    Finish,
    FinishReason,
    PositionLogprobs,
    Submit,
    Text,
)
from quintet.wire.supervision import Drain, Drained, SlotState

C, H = "/v1/completions", "/v1/chat/completions"


class RawStream:
    """A request on a bare socket, read one HTTP chunk (one write of the server) at a time."""

    def __init__(self, server: Any, path: str, body: dict[str, Any], header: str = "accept: */*") -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{header}\r\ncontent-length: {len(sent)}\r\n\r\n"
        self.socket.sendall(head.encode() + sent)
        self.reader = self.socket.makefile("rb")

    def head(self) -> bytes:
        lines = []
        while (line := self.reader.readline()) not in {b"\r\n", b""}:
            lines.append(line)
        return b"".join(lines)

    def chunk(self) -> bytes:
        size = int(self.reader.readline(), 16)
        chunk = self.reader.read(size)
        self.reader.readline()
        return chunk

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


def settle(server: Any) -> int:
    """Return the number of live requests after the event loop's pending callbacks."""
    return int(server.call(lambda: server.service.requests.num_live))


@pytest.mark.parametrize("path", [C, H])
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_request(serve: Callable[..., Any], path: str, stream: bool) -> None:
    server = serve()
    server.engine.held = True
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": stream}
    raw = RawStream(server, path, body)
    submit = server.engine.wait_for(Submit)[0]
    raw.close()
    cancel = server.engine.wait_for(Cancel)[0]
    assert cancel.request_ids == [submit.request_id, submit.request_id + 1]
    assert settle(server) == 0
    assert server.service.num_exchanges == 0
    server.engine.held = False
    assert server.ask("POST", C, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_disconnect_during_output_cancels_the_request(serve: Callable[..., Any]) -> None:
    server = serve()
    raw = RawStream(server, C, {"prompt": "x", "max_tokens": 100_000, "stream": True})
    assert b"200 OK" in raw.head()
    assert b" t0" in raw.chunk()
    raw.close()
    server.engine.wait_for(Cancel)
    assert settle(server) == 0


def test_a_disconnect_cancels_all_prompts_of_a_list(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.held = True
    raw = RawStream(server, C, {"prompt": ["a", "b", "c"], "stream": True})
    server.engine.wait_for(Submit, 3)
    raw.close()
    server.engine.wait_for(Cancel, 3)
    assert settle(server) == 0


KEEP_ALIVE_EVENT = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'


@pytest.mark.parametrize("originator", ["codex_cli_rs", "other"])
def test_codex_reads_events_in_silence(serve: Callable[..., Any], originator: str) -> None:
    """It ends a stream after 300 s without an event; its parser drops comments."""
    server = serve(keep_alive_s=0.05)
    server.engine.held = True
    raw = RawStream(
        server, "/v1/responses", {"input": "x", "stream": True}, f"originator: {originator}\r\naccept: */*"
    )
    try:
        raw.head()
        silence = KEEP_ALIVE_EVENT if originator == "codex_cli_rs" else b": keep-alive\n\n"
        assert raw.chunk() == raw.chunk() == silence
        server.call(server.engine.release)
        rest = raw.chunk()
        while rest == silence:
            rest = raw.chunk()
        assert rest.startswith(
            b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
        )
    finally:
        raw.close()


@pytest.mark.parametrize(
    ("accept", "comment"), [("*/*", b": keep-alive\n\n"), ("text/event-stream", b": keep-alive\n")]
)
def test_silence_is_filled_with_comments(serve: Callable[..., Any], accept: str, comment: bytes) -> None:
    """Some clients lose the event after a comment without a blank line; others read the line as an event, beside ids."""
    server = serve(keep_alive_s=0.05)
    server.engine.held = True
    raw = RawStream(server, C, {"prompt": "x", "max_tokens": 1, "stream": True}, f"accept: {accept}")
    try:
        assert b"text/event-stream" in raw.head()
        assert raw.chunk() == raw.chunk() == comment
        server.call(server.engine.release)
        rest = raw.chunk()
        while rest == comment:
            rest = raw.chunk()
        assert b" t0" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
    finally:
        raw.close()


def test_the_events_of_a_step_share_one_write(serve: Callable[..., Any]) -> None:
    server = serve()
    raw = RawStream(server, C, {"prompt": "x", "max_tokens": 2, "n": 3, "stream": True})
    try:
        raw.head()
        first, last = raw.chunk(), raw.chunk()
        assert first.count(b"data: ") == 3
        assert last.count(b"data: ") == 4
        assert last.endswith(b"data: [DONE]\n\n")
        assert raw.chunk() == b""
    finally:
        raw.close()


def test_a_slow_reader_gets_the_whole_answer(serve: Callable[..., Any]) -> None:
    server = serve()
    num_tokens = 10_000
    raw = RawStream(server, C, {"prompt": "x" * 200, "max_tokens": num_tokens, "stream": True})
    try:
        server.engine.wait_for_idle()
        raw.head()
        body = b"".join(iter(raw.chunk, b""))
    finally:
        raw.close()
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == "".join(f" t{i}" for i in range(num_tokens))


def test_an_error_before_any_output_keeps_its_status(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.fail_after = 0
    reply = server.ask("POST", C, {"prompt": "x", "stream": True})
    assert reply.status == 500
    assert reply.json["error"]["message"] == "The engine broke."


@pytest.mark.parametrize("path", [C, H])
def test_an_error_after_output_is_an_event(serve: Callable[..., Any], path: str) -> None:
    server = serve()
    server.engine.fail_after = 2
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
    reply = server.ask("POST", path, body)
    assert reply.status == 200
    assert reply.events[-1]["error"]["message"] == "The engine broke."
    assert reply.events[-1]["error"]["code"] == "500"
    assert reply.body.endswith(b"data: [DONE]\n\n")
    server.engine.fail_after = None
    assert server.ask("POST", C, {"prompt": "x", "max_tokens": 1}).status == 200


def test_one_failing_prompt_of_a_list_ends_the_others(serve: Callable[..., Any]) -> None:
    server = serve()
    reply = server.ask("POST", C, {"prompt": ["ok", "x" * 251], "max_tokens": 100_000})
    assert reply.status == 400
    server.engine.wait_for(Cancel)
    assert settle(server) == 0


def test_a_full_queue_is_a_429(serve: Callable[..., Any]) -> None:
    server = serve(max_queued_requests=2)
    for body in ({"prompt": ["a", "b", "c"]}, {"prompt": "x", "n": 3}, {"prompt": ["a", "b"], "n": 2}):
        too_many = server.ask("POST", C, body)
        assert too_many.status == 400
        assert "at most 2" in too_many.json["error"]["message"]
    server.engine.held = True
    waiting = [RawStream(server, C, {"prompt": "x", "max_tokens": 1, "n": 2})]
    server.engine.wait_for(Submit)
    refused = server.ask("POST", H, {"messages": [{"role": "user", "content": "x"}]})
    assert refused.status == 429
    assert refused.json["error"]["type"] == "RateLimitError"
    assert int(refused.headers["retry-after"]) >= 1
    server.call(server.engine.release)
    for raw in waiting:
        assert b"200 OK" in raw.head()
        raw.close()
    assert server.ask("POST", C, {"prompt": "x", "max_tokens": 1}).status == 200


def test_requests_before_the_model_is_loaded_are_503(serve: Callable[..., Any], topology: Any) -> None:
    server = serve(states={"core": SlotState.STARTING, "executor": SlotState.STARTING})
    for version, missing in enumerate((["core", "executor"], ["executor"]), start=2):
        refused = server.ask("POST", C, {"prompt": "x"})
        assert refused.status == 503
        assert " and ".join(missing) in refused.json["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert server.ask("GET", "/readyz").json["missing"] == missing
        states = dict.fromkeys(missing[1:], SlotState.STARTING)
        server.call(server.service.handle, topology(version, **states))
    assert server.ask("POST", C, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_request_waits_for_a_core_that_is_being_replaced(serve: Callable[..., Any], topology: Any) -> None:
    server = serve()
    server.call(server.service.handle, topology(2, core=SlotState.DOWN))
    waiting = RawStream(server, C, {"prompt": "x", "max_tokens": 1, "stream": True})
    assert any(settle(server) for _ in range(100_000))
    assert not [m for _, _, m in server.engine.sent if isinstance(m, Submit)]
    server.call(server.service.handle, topology(3))
    assert b"200 OK" in waiting.head()
    waiting.close()


def test_health_names_processes_that_are_not_ready(serve: Callable[..., Any], topology: Any) -> None:
    server = serve()
    assert server.ask("GET", "/health").json["status"] == "ok"
    assert server.ask("GET", "/readyz").status == 200
    server.call(server.service.handle, topology(2, detokenizer=SlotState.STALLED))
    sick = server.ask("GET", "/health")
    assert sick.status == 503
    assert sick.json["processes"] == [{"process": "detokenizer-0.1", "state": "stalled", "note": ""}]
    assert server.ask("GET", "/readyz").status == 503
    assert server.ask("GET", "/livez").status == 200


def test_requests_survive_the_loss_of_a_core(serve: Callable[..., Any], topology: Any) -> None:
    server = serve()
    server.engine.held = True
    raw = RawStream(server, C, {"prompt": "x", "max_tokens": 2, "stream": True})
    server.engine.wait_for(Submit)
    server.call(server.service.handle, topology(2, core=SlotState.DOWN))
    server.call(server.service.handle, topology(3))
    assert [submit.spec.attempt for submit in server.engine.wait_for(Submit, 2)] == [0, 1]
    server.call(server.engine.release)
    assert b"200" in raw.head()
    raw.close()


def test_draining_finishes_running_requests_and_rejects_new_ones(
    serve: Callable[..., Any], topology: Any
) -> None:
    server = serve()
    server.engine.held = True
    running = RawStream(server, C, {"prompt": "x", "max_tokens": 2, "stream": True})
    server.engine.wait_for(Submit)
    server.call(server.service.handle, msgspec.structs.replace(topology(2), draining=True))
    server.call(server.service.handle, Drain())
    refused = server.ask("POST", C, {"prompt": "x"})
    assert refused.status == 503
    assert refused.headers["connection"] == "close"
    assert server.ask("GET", "/readyz").status == 503
    assert not [m for _, _, m in server.engine.sent if isinstance(m, Drained)]
    server.call(server.engine.release)
    running.head()
    assert b" t0" in running.chunk()
    assert running.chunk().endswith(b"data: [DONE]\n\n")
    running.close()
    server.engine.wait_for(Drained)
    roles = [role for role, _, message in server.engine.sent if isinstance(message, Drained)]
    assert roles == [Role.SUPERVISOR]


@pytest.mark.parametrize("n", [1, 2])
def test_every_event_has_a_stream_cursor(shared: Any, n: int) -> None:
    body = {"prompt": "x", "max_tokens": 3, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    reply = shared.ask("POST", C, body)
    streams, _, positions = zip(*(event_id.partition(":") for event_id in reply.event_ids), strict=True)
    assert set(streams) == {reply.headers["x-stream-id"]}
    assert len(positions) == len(reply.events) == reply.body.count(b"data: ") - 1  # all but [DONE]
    if n == 1:
        assert positions == ("1", "2", "3e", "3e.u")
    else:
        assert positions == ("1,0", "1,1", "2,1", "2,2", "3e,2", "3e,3e", "3e,3e.u")


@pytest.mark.parametrize(
    ("num_prompts", "n", "has_ids"), [(1, 32, True), (4, 8, True), (1, 33, False), (3, 100, False)]
)
def test_event_ids_are_bounded_in_the_number_of_choices(
    shared: Any, num_prompts: int, n: int, has_ids: bool
) -> None:
    body = {"prompt": ["x"] * num_prompts, "max_tokens": 12, "n": n, "stream": True}
    reply = shared.ask("POST", C, body)
    assert len(reply.events) >= 12 * n * num_prompts
    assert ("x-stream-id" in reply.headers) == has_ids == bool(reply.event_ids)
    assert len(reply.body) / len(reply.events) < 450


@pytest.mark.parametrize("path", [C, "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("headers", "has_ids"),
    [
        ({"accept": "*/*"}, False),
        ({"accept": "application/json"}, False),
        ({"accept": "application/json, text/event-stream"}, True),
        ({}, True),
        ({"user-agent": "Go-http-client/1.1"}, False),
        ({"user-agent": "req/0.5.15"}, False),
        ({"user-agent": "req/0.5.15", "accept": "text/event-stream"}, True),
    ],
)
def test_clients_that_take_each_line_for_json_get_data_lines_alone(
    shared: Any, path: str, headers: dict[str, str], has_ids: bool
) -> None:
    """Others read a stream as benchmarks and LangChain for Elixir do: all text is JSON after ``data: ``."""
    prompt = {C: {"prompt": "x"}, "/v1/responses": {"input": "x", "max_output_tokens": 3}}
    body = {**prompt.get(path, {"messages": [{"role": "user", "content": "x"}]}), "stream": True}
    body |= {} if path == "/v1/responses" else {"max_tokens": 3}
    reply = shared.ask("POST", path, body, headers)
    assert reply.events and bool(reply.event_ids) == has_ids == ("x-stream-id" in reply.headers)
    if path == C and not has_ids:
        lines = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line]
        assert lines.pop() == b"[DONE]" and all(json.loads(line)["choices"] for line in lines)


def test_events_have_no_ids_without_a_resume_grace(serve: Callable[..., Any]) -> None:
    server = serve(resume_grace_s=0.0)
    reply = server.ask("POST", C, {"prompt": "x", "max_tokens": 3, "stream": True})
    assert reply.event_ids == []
    assert "x-stream-id" not in reply.headers


@pytest.mark.parametrize(
    ("stream", "position", "status"),
    [
        ("nonsense", "0", 404),
        (f"5-{'0' * 31}", "0", 404),
        (f"5-{'0' * 32}", "0", 404),
        (f"{'f' * 17}-{'0' * 32}", "0", 404),
    ],
)
def test_an_unknown_stream_is_an_error(
    serve: Callable[..., Any], stream: str, position: str, status: int
) -> None:
    server = serve()
    reply = server.ask("GET", f"/v1/streams/{stream}?from={position}")
    assert reply.status == status
    assert reply.json["error"]["param"] == "stream"


def test_a_connection_is_reused_after_a_stream(shared: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    try:
        for _ in range(3):
            connection.request("POST", C, json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}))
            assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    finally:
        connection.close()


def deliver_text(server: Any, submit: Submit, *deltas: str) -> None:
    """Deliver text of a held request of one choice."""
    stream = next(iter(server.service.requests._streams.values()))
    for delta in deltas:
        choice = stream.choices[0]
        index, offset = len(choice.output_ids), choice.num_chars
        ids = pack_i32([7])
        server.engine.deliver(
            Text(1, 0, 0, [], [submit.request_id], [delta], [offset], [index], [1], ids, [])
        )


def test_an_unread_whole_answer_is_dropped_after_the_write_timeout(serve: Callable[..., Any]) -> None:
    server = serve(write_timeout_s=0.05)
    server.engine.held = True
    raw = RawStream(server, C, {"prompt": "x"})
    submit = server.engine.wait_for(Submit)[0]
    server.call(deliver_text, server, submit, "x" * (16 << 20))
    finish = Finish(submit.request_id, FinishReason.STOP, None, 1)
    server.call(server.engine.deliver, Text(2, 0, 0, [], [], [], [], [], [], b"", [finish]))
    connections = server._server.server_state.connections
    assert any(not server.call(len, connections) for _ in range(1_000_000))
    assert len(raw.reader.read()) < 16 << 20
    raw.close()


def blocked(server: Any) -> tuple[RawStream, Submit]:
    """Return a stream with a blocked write, because its client has not read."""
    server.engine.held = True
    raw = RawStream(server, C, {"prompt": "x", "stream": True})
    submit = server.engine.wait_for(Submit)[0]
    server.call(deliver_text, server, submit, "x" * (16 << 20))
    server.call(deliver_text, server, submit, "y")
    return raw, submit


def is_truncated(raw: RawStream) -> bool:
    """Read to the end; return true if the answer was truncated."""
    try:
        return not raw.reader.read().endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    except ConnectionResetError:
        return True


def test_too_much_unread_output_ends_the_connection(serve: Callable[..., Any]) -> None:
    server = serve()
    raw, submit = blocked(server)
    server.call(deliver_text, server, submit, "x" * (1 << 20), "z")
    server.engine.wait_for(Cancel)
    assert is_truncated(raw)
    raw.close()
    assert settle(server) == 0


def test_a_write_that_blocks_too_long_ends_the_connection(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(write_timeout_s=0.05)
    raw, _ = blocked(server)
    server.engine.wait_for(Cancel)
    assert is_truncated(raw)
    raw.close()
    assert settle(server) == 0
    assert not caplog.records


def test_a_draining_frontend_serves_requests_and_closes_connections(serve: Callable[..., Any]) -> None:
    server = serve()
    server.call(server.service.handle, Drain())  # the topology does not drain: other frontends serve
    answer = server.ask("POST", C, {"prompt": "x", "max_tokens": 2})
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert not [m for _, _, m in server.engine.sent if isinstance(m, Drained)], "requests may still arrive"


def test_an_unread_stream_does_not_delay_shutdown(
    serve: Callable[..., Any], topology: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_timers, "DRAIN_WRITE_S", 0.05)
    server = serve()
    raw, _ = blocked(server)
    server.call(server.service.handle, msgspec.structs.replace(topology(2), draining=True))
    server.call(server.service.handle, Drain())
    server.engine.wait_for(Drained)
    assert is_truncated(raw)
    raw.close()


@pytest.mark.parametrize("path", [C, H])
def test_all_logprob_token_ids_are_returned(shared: Any, path: str) -> None:
    body = {"max_tokens": 1, "logprob_token_ids": [10, 11, 12]}
    if path == C:
        (choice,) = shared.ask("POST", path, {**body, "prompt": "x", "logprobs": 1}).json["choices"]
        assert list(choice["logprobs"]["top_logprobs"][0]) == [" t0", " t1", " t2"]
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        (choice,) = shared.ask("POST", path, body).json["choices"]
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
        assert [top["token"] for top in tops] == [" t0", " t1", " t2"]


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_most_likely_of_alternatives_with_equal_text_is_returned(chosen: int) -> None:
    """Tokens of parts of characters decode to the same text. lm-eval compares the largest value with the token's."""
    logprobs = {1: -0.5, 2: -2.0, 3: -3.0}
    texts = {1: "\ufffd", 2: "\ufffd", 3: "x"}
    top = [
        Alternative(i, logprob, texts[i], b"", rank) for rank, (i, logprob) in enumerate(logprobs.items(), 1)
    ]
    options = AnswerOptions("cmpl-1", 0, "m", 1, logprobs=3, max_alternatives=3)
    shape = completion_logprobs([PositionLogprobs(top[chosen - 1], top, 0)], options)
    assert shape["top_logprobs"] == [{"\ufffd": -0.5, "x": -3.0}]
    assert shape["token_logprobs"] == [logprobs[chosen]]
