"""FastChat's worker protocol with a fake server and controller; `tests/clients/platforms` has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.deploy.router.test_router import Upstream, head, run

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.integrations.fastchat.app import FastChatApp
from quintet.deploy.integrations.fastchat.protocol import (
    BEGIN,
    END,
    TEMPLATE,
    EventData,
    Params,
    completion_of,
    messages_of,
)
from quintet.deploy.integrations.fastchat.registration import Registration
from quintet.deploy.integrations.fastchat.worker import main
from quintet.frontend.http.bodies import BodyBuffers
from quintet.wire.errors import EXIT_CONFIG

STREAM, WHOLE = "/worker_generate_stream", "/worker_generate"
AnswerFor = Callable[[str, dict[str, Any]], tuple[int, bytes]]


def as_fastchat(system: str, *messages: str | None) -> str:
    """Return a conversation as FastChat renders it, in the style of that number of its class `Conversation`."""
    assert TEMPLATE["sep_style"] == 2 and isinstance(TEMPLATE["roles"], list)
    text = str(TEMPLATE["system_template"]).format(system_message=system) + str(TEMPLATE["sep"])
    for number, message in enumerate(messages):
        text += TEMPLATE["roles"][number % 2] + ":"
        text += f" {message}{TEMPLATE[('sep', 'sep2')[number % 2]]}" if message else ""
    return text


@dataclass
class World:
    """A worker, its server and its controller."""

    app: FastChatApp
    registration: Registration
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Requests to the server."""
    registrations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Requests to the controller."""
    knows_sender: bool = True
    """True: the controller knows the sender of a heartbeat."""
    is_up: bool = True

    async def ask(
        self, path: str, body: object, leave_event: asyncio.Event | None = None
    ) -> tuple[int, bytes]:
        sent: list[Any] = []
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)

        async def leave() -> None:
            assert leave_event is not None
            await leave_event.wait()
            incoming.put_nowait({"type": "http.disconnect"})

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        leaving = asyncio.ensure_future(leave()) if leave_event is not None else None
        await self.app(scope, incoming.get, send)
        if leaving is not None:
            leaving.cancel()
        if not sent:
            return 0, b""
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def answers_of(self, path: str, body: object) -> list[dict[str, Any]]:
        status, answers = await self.ask(path, body)
        assert status == 200
        if path != STREAM:
            return [json.loads(answers)]
        assert answers.endswith(b"\0")
        return [json.loads(item) for item in answers.split(b"\0")[:-1]]


READY = {"/readyz": (200, b"{}"), "/v1/models": (200, b'{"data":[{"id":"toy","max_model_len":8}]}')}


@contextlib.asynccontextmanager
async def world(answers: AnswerFor) -> AsyncIterator[World]:
    """Run a worker and a ready server with these answers."""

    async def server_answers(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not w.is_up:
            writer.transport.abort()
            return
        path, body = received["path"], json.loads(received["body"] or b"{}")
        status, answer = READY[path] if path in READY else answers(path, body)
        if path not in READY:
            w.received.append((path, body))
        kind = b"text/event-stream" if answer.startswith((b"data", b":")) else b"application/json"
        writer.write(head(status, kind=kind) + answer)
        if answer.startswith(b":"):  # endless stream until the client disconnects
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b": \n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            disconnected.set()

    async def controller_answers(
        up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        w.registrations.append((received["path"], json.loads(received["body"])))
        writer.write(
            head(kind=b"application/json") + b'{"exist":%b}' % (b"true" if w.knows_sender else b"false")
        )

    disconnected = asyncio.Event()
    ups = [Upstream(server_answers), Upstream(controller_answers)]
    listening = [await asyncio.start_server(up.take, "127.0.0.1", 0) for up in ups]
    ports = [item.sockets[0].getsockname()[1] for item in listening]
    server, controller = (ConnectionPool(Target.parse(f"http://127.0.0.1:{port}")) for port in ports)
    registration = Registration(controller, server, "http://me:1", 0.0)
    w = World(FastChatApp(server, registration, BodyBuffers(1 << 20)), registration)
    await registration.look()
    yield w
    if any(path == "/v1/completions" for path, _ in w.received) and answers is endless_stream:
        await disconnected.wait()
    for peer in (server, controller):
        peer.close_connections()
    for item in listening:
        item.close()
    for up in ups:
        await asyncio.gather(*up.tasks)


def endless_stream(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, b": \n"


def event(**what: object) -> bytes:
    return b"data: " + json.dumps(what).encode() + b"\n\n"


def stream(*events: bytes) -> AnswerFor:
    return lambda path, body: (200, b"".join(events) + b"data: [DONE]\n\n")


def test_conversation_is_parsed_from_fastchats_prompt() -> None:
    answers = as_fastchat("Be brief: yes.", "a: b", "c\nd", "e ", None)
    assert messages_of(answers) == [
        {"role": "system", "content": "Be brief: yes."},
        {"role": "user", "content": "a: b"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e "},
    ]
    assert messages_of(as_fastchat("", "x", "", "y", None)) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "y"},
    ]
    assert messages_of("A chat.\nUSER: x") is None
    assert (BEGIN + END).isprintable() is False


def test_server_renders_conversations_and_text_is_unchanged() -> None:
    def answers_for(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, b'{"tokens":[5,6,7]}'
        return 200, b'{"choices":[{"text":"hi","finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'

    async def scenario() -> None:
        async with world(answers_for) as w:
            (registrations,) = await w.answers_of(
                WHOLE, {"prompt": as_fastchat("", "x", None), "model": "toy"}
            )
            assert (registrations["text"], registrations["error_code"], registrations["finish_reason"]) == (
                "hi",
                0,
                "stop",
            )
            assert registrations["usage"]["prompt_tokens"] == 3
            (_, tokenized), (_, completed) = w.received
            assert tokenized == {"messages": [{"role": "user", "content": "x"}], "model": "toy"}
            assert completed["prompt"] == [5, 6, 7]
            w.received.clear()
            await w.answers_of(
                WHOLE, {"prompt": "USER: x", "stop": ["", "\n"], "max_new_tokens": 4, "top_p": 0}
            )
            ((path, completed),) = w.received
            assert path == "/v1/completions" and completed["prompt"] == "USER: x"
            assert (
                completed["stop"] == ["\n"] and completed["max_tokens"] == 4 and 0 < completed["top_p"] < 1e-3
            )
            assert await w.answers_of("/count_token", {"prompt": "x"}) == [{"count": 3, "error_code": 0}]
            assert await w.answers_of("/model_details", {}) == [{"context_length": 8}]

    run(scenario())


def test_defaults_are_those_of_fastchats_workers() -> None:
    body = completion_of(Params(prompt="x", frequency_penalty=None), "x", is_streamed=True)
    assert body["max_tokens"] == 256 and body["echo"] is True and body["stop"] == []
    assert "frequency_penalty" not in body and "model" not in body


def test_stream_repeats_all_text_and_ends_separately() -> None:
    one = {"tokens": ["a"], "token_logprobs": [-1.0], "text_offset": [0], "top_logprobs": None}
    answers = stream(
        event(choices=[{"text": "a", "logprobs": one}], usage={"prompt_tokens": 2, "completion_tokens": 1}),
        event(choices=[{"text": "b", "logprobs": {**one, "tokens": ["b"]}, "finish_reason": "length"}]),
    )

    async def scenario() -> None:
        async with world(answers) as w:
            registrations = await w.answers_of(STREAM, {"prompt": "x"})
            assert registrations[-1]["text"] == registrations[-2]["text"] == "ab"
            assert [item["finish_reason"] for item in registrations[-2:]] == [None, "length"]
            assert all(item["error_code"] == 0 for item in registrations)
            assert registrations[-1]["usage"] == {
                "prompt_tokens": 2,
                "total_tokens": 0,
                "completion_tokens": 1,
            }
            assert registrations[-1]["logprobs"]["tokens"] == ["a", "b"]
            assert registrations[-1]["logprobs"]["top_logprobs"] == [None, None]

    run(scenario())


def test_events_are_reassembled_from_any_chunks() -> None:
    answers = b'data: {"a":1}\n\n: keep-alive\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(answers)):
        data = EventData()
        found = [item for at in range(0, len(answers), size) for item in data.take(answers[at : at + size])]
        assert found == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": "is 3", "param": "temperature", "code": "400"}, 40302),
        (400, {"message": "9 tokens", "param": "prompt", "code": "context_length_exceeded"}, 40303),
        (401, {"message": "no key", "code": "401"}, 40102),
        (404, {"message": "no model", "code": "404"}, 40301),
        (429, {"message": "is full", "code": "429"}, 42903),
        (500, {"message": "a mistake", "code": "500"}, 50001),
        (503, {"message": "is ending", "code": "503"}, 50006),
    ],
)
def test_server_errors_map_to_fastchat_codes(status: int, error: dict[str, Any], code: int) -> None:
    def answers_for(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, b'{"tokens":[1,2,3,4,5,6,7,8,9]}'
        return status, json.dumps({"error": error}).encode()

    async def scenario() -> None:
        async with world(answers_for) as w:
            for path in (WHOLE, STREAM):
                assert await w.answers_of(path, {"prompt": "x"}) == [
                    {"text": error["message"], "error_code": code}
                ]

    run(scenario())


def test_error_or_server_loss_ends_a_stream() -> None:
    async def scenario() -> None:
        failing = stream(event(choices=[{"text": "a"}]), event(error={"message": "oh", "code": "500"}))
        async with world(failing) as w:
            registrations = await w.answers_of(STREAM, {"prompt": "x"})
            assert registrations[-1] == {"text": "oh", "error_code": 50001}
        async with world(lambda path, body: (200, b'{"tokens":[1]}')) as w:
            w.is_up = False
            for path in (WHOLE, STREAM):
                (answer,) = await w.answers_of(path, {"prompt": "x"})
                assert answer["error_code"] == 50006 and "lost its server" in answer["text"]
            (counted,) = await w.answers_of("/count_token", {"prompt": "x"})
            assert counted["count"] == 0 and counted["error_code"] == 50006

    run(scenario())


def test_invalid_requests_get_an_error() -> None:
    async def scenario() -> None:
        async with world(stream()) as w:
            for path, body in ((WHOLE, b"{"), (STREAM, {"prompt": 5}), ("/count_token", {})):
                (registrations,) = await w.answers_of(path, body)
                assert registrations["error_code"] == 40001 and "Invalid request" in registrations["text"]
            (registrations,) = await w.answers_of(STREAM, {"prompt": "x", "images": ["…"]})
            assert registrations["error_code"] == 40302 and "supports text only" in registrations["text"]
            (registrations,) = await w.answers_of("/worker_get_embeddings", {"input": ["x"]})
            assert registrations["error_code"] == 40301
            status, answers = await w.ask("/nowhere", {})
            assert status == 404 and "/worker_generate_stream" in json.loads(answers)["text"]
            assert not w.received

    run(scenario())


def test_disconnect_cancels_the_server_request() -> None:
    async def scenario() -> None:
        async with world(endless_stream) as w:
            leave_event = asyncio.Event()
            pending_request = asyncio.ensure_future(w.ask(STREAM, {"prompt": "x"}, leave_event))
            while not w.received:
                await asyncio.sleep(0.005)
            assert w.registration.status()["queue_length"] == 1
            leave_event.set()
            await pending_request
            assert w.registration.num_open == 0

    run(scenario())


def test_worker_is_registered_while_its_server_is_ready() -> None:
    async def scenario() -> None:
        async with world(stream()) as w:
            worker_status = {"model_names": ["toy"], "speed": 1, "queue_length": 0}
            worker = {"worker_name": "http://me:1", "check_heart_beat": True, "worker_status": worker_status}
            assert w.registrations == [("/register_worker", worker)]
            await w.registration.look()
            assert w.registrations[1:] == [
                ("/receive_heart_beat", {"worker_name": "http://me:1", "queue_length": 0})
            ]
            w.knows_sender = False
            await w.registration.look()
            assert [path for path, _ in w.registrations[2:]] == ["/receive_heart_beat", "/register_worker"]
            w.is_up = False
            await w.registration.look()
            assert w.registrations[-1][1]["worker_status"]["model_names"] == []
            assert (await w.ask("/worker_get_status", {}))[0] == 503
            num_registrations = len(w.registrations)
            await w.registration.look()
            assert len(w.registrations) == num_registrations, "a withdrawn worker sends no heartbeats"
            w.is_up = True
            await w.registration.look()
            assert w.registrations[-1] == ("/register_worker", worker)
            assert json.loads((await w.ask("/worker_get_status", {}))[1]) == worker_status
            await w.registration.withdraw()
            assert w.registrations[-1][1]["worker_status"]["model_names"] == []

    run(scenario())


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/readyz", 404, "set --server to a Quintet server"),
        ("/v1/models", 401, "the worker's --api-key"),
    ],
)
def test_unusable_server_is_logged_once(
    path: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with world(stream()) as w:
            for _ in range(3):
                await w.registration.look()
            assert not w.registrations and w.registration.model is None

    monkeypatch.setitem(READY, path, (status, b'{"error":{"message":"No key.","code":"401"}}'))
    with caplog.at_level("WARNING", "quintet"):
        run(scenario())
    assert len([message for message in caplog.messages if words in message]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server", "ftp://x"], "--server: 'ftp://x' is not a server URL"),
        (["--heartbeat", "100"], "--heartbeat is 100; it must be above 0 and at most 60"),
    ],
)
def test_invalid_flags_are_rejected(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *flags]) == EXIT_CONFIG
    assert words in capsys.readouterr().err
