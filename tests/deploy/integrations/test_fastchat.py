"""FastChat's worker protocol, with a server and a controller of the test; `tests/clients/platforms` has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.deploy.router.test_router import Upstream, head, run

from quintet.deploy.integrations.fastchat.app import App
from quintet.deploy.integrations.fastchat.peer import Peer
from quintet.deploy.integrations.fastchat.registration import Registration
from quintet.deploy.integrations.fastchat.request import (
    BEGIN,
    END,
    TEMPLATE,
    Params,
    completion_of,
    messages_of,
)
from quintet.deploy.integrations.fastchat.response import EventData
from quintet.deploy.integrations.fastchat.worker import main
from quintet.deploy.tools.load_client.connection import Target
from quintet.frontend.http.bodies import BodyBuffers
from quintet.wire.errors import EXIT_CONFIG

STREAM, WHOLE = "/worker_generate_stream", "/worker_generate"
Said = Callable[[str, dict[str, Any]], tuple[int, bytes]]


def as_fastchat(system: str, *messages: str | None) -> str:
    """Return what FastChat makes of a conversation: the style of this number, of its class `Conversation`."""
    assert TEMPLATE["sep_style"] == 2 and isinstance(TEMPLATE["roles"], list)
    text = str(TEMPLATE["system_template"]).format(system_message=system) + str(TEMPLATE["sep"])
    for number, message in enumerate(messages):
        text += TEMPLATE["roles"][number % 2] + ":"
        text += f" {message}{TEMPLATE[('sep', 'sep2')[number % 2]]}" if message else ""
    return text


@dataclass
class World:
    """A worker, its server and its controller."""

    app: App
    registration: Registration
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What the server was asked."""
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What the controller was told."""
    knows: bool = True
    """Whether the controller knows who sends it heartbeats."""
    is_up: bool = True

    async def ask(self, path: str, body: object, leaves: asyncio.Event | None = None) -> tuple[int, bytes]:
        sent: list[Any] = []
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)

        async def leave() -> None:
            assert leaves is not None
            await leaves.wait()
            incoming.put_nowait({"type": "http.disconnect"})

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        leaving = asyncio.ensure_future(leave()) if leaves is not None else None
        await self.app(scope, incoming.get, send)
        if leaving is not None:
            leaving.cancel()
        if not sent:
            return 0, b""
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def told_of(self, path: str, body: object) -> list[dict[str, Any]]:
        status, said = await self.ask(path, body)
        assert status == 200
        if path != STREAM:
            return [json.loads(said)]
        assert said.endswith(b"\0")
        return [json.loads(each) for each in said.split(b"\0")[:-1]]


READY = {"/readyz": (200, b"{}"), "/v1/models": (200, b'{"data":[{"id":"toy","max_model_len":8}]}')}


@contextlib.asynccontextmanager
async def world(said: Said) -> AsyncIterator[World]:
    """Run a worker, before a server that is ready and says this."""

    async def server_says(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not w.is_up:
            writer.transport.abort()
            return
        path, body = asked["path"], json.loads(asked["body"] or b"{}")
        status, answer = READY[path] if path in READY else said(path, body)
        if path not in READY:
            w.asked.append((path, body))
        kind = b"text/event-stream" if answer.startswith((b"data", b":")) else b"application/json"
        writer.write(head(status, kind=kind) + answer)
        if answer.startswith(b":"):  # it goes on until nobody listens
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b": \n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            left.set()

    async def controller_says(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        w.told.append((asked["path"], json.loads(asked["body"])))
        writer.write(head(kind=b"application/json") + b'{"exist":%b}' % (b"true" if w.knows else b"false"))

    left = asyncio.Event()
    ups = [Upstream(server_says), Upstream(controller_says)]
    listening = [await asyncio.start_server(up.take, "127.0.0.1", 0) for up in ups]
    ports = [each.sockets[0].getsockname()[1] for each in listening]
    server, controller = (Peer(Target.parse(f"http://127.0.0.1:{port}")) for port in ports)
    registration = Registration(controller, server, "http://me:1", 0.0)
    w = World(App(server, registration, BodyBuffers(1 << 20)), registration)
    await registration.look()
    yield w
    if any(path == "/v1/completions" for path, _ in w.asked) and said is goes_on:
        await left.wait()
    for peer in (server, controller):
        peer.hang_up()
    for each in listening:
        each.close()
    for up in ups:
        await asyncio.gather(*up.tasks)


def goes_on(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, b": \n"


def event(**what: object) -> bytes:
    return b"data: " + json.dumps(what).encode() + b"\n\n"


def stream(*events: bytes) -> Said:
    return lambda path, body: (200, b"".join(events) + b"data: [DONE]\n\n")


def test_a_conversation_comes_back_as_it_was_said() -> None:
    said = as_fastchat("Be brief: yes.", "a: b", "c\nd", "e ", None)
    assert messages_of(said) == [
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


def test_a_conversation_is_rendered_by_the_server_and_a_text_goes_as_it_is() -> None:
    def says(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, b'{"tokens":[5,6,7]}'
        return 200, b'{"choices":[{"text":"hi","finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'

    async def story() -> None:
        async with world(says) as w:
            (told,) = await w.told_of(WHOLE, {"prompt": as_fastchat("", "x", None), "model": "toy"})
            assert (told["text"], told["error_code"], told["finish_reason"]) == ("hi", 0, "stop")
            assert told["usage"]["prompt_tokens"] == 3
            (_, tokenized), (_, completed) = w.asked
            assert tokenized == {"messages": [{"role": "user", "content": "x"}], "model": "toy"}
            assert completed["prompt"] == [5, 6, 7]
            w.asked.clear()
            await w.told_of(WHOLE, {"prompt": "USER: x", "stop": ["", "\n"], "max_new_tokens": 4, "top_p": 0})
            ((path, completed),) = w.asked
            assert path == "/v1/completions" and completed["prompt"] == "USER: x"
            assert (
                completed["stop"] == ["\n"] and completed["max_tokens"] == 4 and 0 < completed["top_p"] < 1e-3
            )
            assert await w.told_of("/count_token", {"prompt": "x"}) == [{"count": 3, "error_code": 0}]
            assert await w.told_of("/model_details", {}) == [{"context_length": 8}]

    run(story())


def test_defaults_are_those_of_fastchats_workers() -> None:
    body = completion_of(Params(prompt="x", frequency_penalty=None), "x", is_streamed=True)
    assert body["max_tokens"] == 256 and body["echo"] is True and body["stop"] == []
    assert "frequency_penalty" not in body and "model" not in body


def test_a_stream_tells_all_of_the_text_again_and_its_end_by_itself() -> None:
    one = {"tokens": ["a"], "token_logprobs": [-1.0], "text_offset": [0], "top_logprobs": None}
    said = stream(
        event(choices=[{"text": "a", "logprobs": one}], usage={"prompt_tokens": 2, "completion_tokens": 1}),
        event(choices=[{"text": "b", "logprobs": {**one, "tokens": ["b"]}, "finish_reason": "length"}]),
    )

    async def story() -> None:
        async with world(said) as w:
            told = await w.told_of(STREAM, {"prompt": "x"})
            assert told[-1]["text"] == told[-2]["text"] == "ab"
            assert [each["finish_reason"] for each in told[-2:]] == [None, "length"]
            assert all(each["error_code"] == 0 for each in told)
            assert told[-1]["usage"] == {"prompt_tokens": 2, "total_tokens": 0, "completion_tokens": 1}
            assert told[-1]["logprobs"]["tokens"] == ["a", "b"]
            assert told[-1]["logprobs"]["top_logprobs"] == [None, None]

    run(story())


def test_events_are_read_however_they_are_cut() -> None:
    said = b'data: {"a":1}\n\n: keep-alive\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(said)):
        data = EventData()
        found = [each for at in range(0, len(said), size) for each in data.take(said[at : at + size])]
        assert found == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": "is 3", "param": "temperature", "code": 400}, 40302),
        (400, {"message": "9 tokens", "param": "prompt", "code": "context_length_exceeded"}, 40303),
        (401, {"message": "no key", "code": 401}, 40102),
        (404, {"message": "no model", "code": 404}, 40301),
        (429, {"message": "is full", "code": 429}, 42903),
        (500, {"message": "a mistake", "code": 500}, 50001),
        (503, {"message": "is ending", "code": 503}, 50006),
    ],
)
def test_what_the_server_refuses_is_told_as_fastchat_does(
    status: int, error: dict[str, Any], code: int
) -> None:
    def says(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, b'{"tokens":[1,2,3,4,5,6,7,8,9]}'
        return status, json.dumps({"error": error}).encode()

    async def story() -> None:
        async with world(says) as w:
            for path in (WHOLE, STREAM):
                assert await w.told_of(path, {"prompt": "x"}) == [
                    {"text": error["message"], "error_code": code}
                ]

    run(story())


def test_an_error_in_a_stream_ends_it_and_so_does_the_loss_of_the_server() -> None:
    async def story() -> None:
        failing = stream(event(choices=[{"text": "a"}]), event(error={"message": "oh", "code": 500}))
        async with world(failing) as w:
            told = await w.told_of(STREAM, {"prompt": "x"})
            assert told[-1] == {"text": "oh", "error_code": 50001}
        async with world(lambda path, body: (200, b'{"tokens":[1]}')) as w:
            w.is_up = False
            for path in (WHOLE, STREAM):
                (told_once,) = await w.told_of(path, {"prompt": "x"})
                assert told_once["error_code"] == 50006 and "lost its server" in told_once["text"]
            (counted,) = await w.told_of("/count_token", {"prompt": "x"})
            assert counted["count"] == 0 and counted["error_code"] == 50006

    run(story())


def test_what_cannot_be_read_is_told_as_an_error() -> None:
    async def story() -> None:
        async with world(stream()) as w:
            for path, body in ((WHOLE, b"{"), (STREAM, {"prompt": 5}), ("/count_token", {})):
                (told,) = await w.told_of(path, body)
                assert told["error_code"] == 40001 and "Invalid request" in told["text"]
            (told,) = await w.told_of(STREAM, {"prompt": "x", "images": ["…"]})
            assert told["error_code"] == 40302 and "supports text only" in told["text"]
            (told,) = await w.told_of("/worker_get_embeddings", {"input": ["x"]})
            assert told["error_code"] == 40301
            status, said = await w.ask("/nowhere", {})
            assert status == 404 and "/worker_generate_stream" in json.loads(said)["text"]
            assert not w.asked

    run(story())


def test_a_client_that_leaves_ends_what_the_server_computes() -> None:
    async def story() -> None:
        async with world(goes_on) as w:
            leaves = asyncio.Event()
            asking = asyncio.ensure_future(w.ask(STREAM, {"prompt": "x"}, leaves))
            while not w.asked:
                await asyncio.sleep(0.005)
            assert w.registration.status()["queue_length"] == 1
            leaves.set()
            await asking
            assert w.registration.num_open == 0

    run(story())


def test_a_worker_is_known_while_its_server_takes_requests() -> None:
    async def story() -> None:
        async with world(stream()) as w:
            named = {"model_names": ["toy"], "speed": 1, "queue_length": 0}
            about = {"worker_name": "http://me:1", "check_heart_beat": True, "worker_status": named}
            assert w.told == [("/register_worker", about)]
            await w.registration.look()
            assert w.told[1:] == [("/receive_heart_beat", {"worker_name": "http://me:1", "queue_length": 0})]
            w.knows = False
            await w.registration.look()
            assert [path for path, _ in w.told[2:]] == ["/receive_heart_beat", "/register_worker"]
            w.is_up = False
            await w.registration.look()
            assert w.told[-1][1]["worker_status"]["model_names"] == []
            assert (await w.ask("/worker_get_status", {}))[0] == 503
            num_told = len(w.told)
            await w.registration.look()
            assert len(w.told) == num_told, "who is withdrawn sends no heartbeats"
            w.is_up = True
            await w.registration.look()
            assert w.told[-1] == ("/register_worker", about)
            assert json.loads((await w.ask("/worker_get_status", {}))[1]) == named
            await w.registration.withdraw()
            assert w.told[-1][1]["worker_status"]["model_names"] == []

    run(story())


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/readyz", 404, "set --server to a Quintet server"),
        ("/v1/models", 401, "the worker's --api-key"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_of_once(
    path: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with world(stream()) as w:
            for _ in range(3):
                await w.registration.look()
            assert not w.told and w.registration.model is None

    monkeypatch.setitem(READY, path, (status, b'{"error":{"message":"No key.","code":401}}'))
    with caplog.at_level("WARNING", "quintet"):
        run(story())
    assert len([message for message in caplog.messages if words in message]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server", "ftp://x"], "--server: 'ftp://x' is not a server URL"),
        (["--heartbeat", "100"], "--heartbeat is 100; it must be above 0 and at most 60"),
    ],
)
def test_what_cannot_be_a_worker_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *flags]) == EXIT_CONFIG
    assert words in capsys.readouterr().err
