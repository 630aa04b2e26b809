"""Router with fake servers: routing, streaming, resumption and health."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quintet.deploy.cli.route import _check, add_parser
from quintet.deploy.http_client.connection import Connection, Target
from quintet.deploy.router.app import OPEN_PATHS, AccessPolicy, RouterApp
from quintet.deploy.router.attempts import Hedging
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import Pulse, Watch
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.wire.errors import ConfigError, RequestError

C, M = "/v1/completions", "/v1/messages"
STREAM = {"prompt": "x", "stream": True}
Answer = Callable[["Upstream", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(number: int, stream: str = "a1-b2", ids: bool = True) -> bytes:
    """Return the event of one token, with the token ids that the router requests."""
    note = b": ids 0 [%d]\n" % (100 + number) if ids else b""
    return note + b'id: %b:%d\ndata: {"text":"t%d"}\n\n' % (stream.encode(), number + 1, number)


DONE = b"data: [DONE]\n\n"


def head(status: int = 200, *headers: bytes, kind: bytes = b"text/event-stream") -> bytes:
    lines = [b"HTTP/1.1 %d x" % status, b"content-type: " + kind, *headers]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])


TICKET = b"x-quintet-relay: 7.1700000000"


@dataclass
class Upstream:
    """Server with an answer of the test; keeps its requests."""

    answer: Answer
    received: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    keeps: bool = False
    """True: accepts another request on a connection."""

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer on a new connection, in a task that is registered at once."""
        self.tasks.add(asyncio.get_running_loop().create_task(self._answer(reader, writer)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer_one(reader, writer)
            while self.keeps and not writer.is_closing():
                await self._answer_one(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        received = {"method": method, "path": path, "headers": headers, "body": body}
        if path not in ("/readyz", "/metrics"):
            self.received.append(received)
        await self.answer(self, received, writer)
        await writer.drain()


async def whole(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(head(kind=b"application/json") + b'{"ok":true}')


def respond(*pieces: bytes, cut: bool = False) -> Answer:
    """Answer with these bytes; ``cut``: then close, or reset the connection when there are no bytes."""

    async def answer(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pieces))  # no reset after them: it could overtake unread bytes
        if cut and pieces:
            writer.close()
        elif cut:
            writer.transport.abort()

    return answer


@dataclass
class Response:
    """Response as a client receives it."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class World:
    """Router and its servers."""

    app: RouterApp
    servers: Servers
    ups: list[Upstream]

    async def request(
        self,
        path: str,
        body: object,
        method: str = "POST",
        *,
        disconnects: bool = False,
        reads: asyncio.Event | None = None,
        **headers: str,
    ) -> Response:
        """Send a request; ``disconnects``: disconnect at the first part; ``reads``: wait for it before every part."""
        sent: list[Any] = []
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait(
            {"type": "http.request", "body": content if method == "POST" else b"", "more_body": False}
        )
        named = {"accept": "text/event-stream", **headers}
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in named.items()]
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *pairs],
        }  # fmt: skip

        async def send(message: Any) -> None:
            sent.append(message)
            if reads is not None:
                await reads.wait()
            if disconnects:
                incoming.put_nowait({"type": "http.disconnect"})

        await self.app(scope, incoming.get, send)
        start, *rest = sent
        response = {k.decode(): v.decode() for k, v in start["headers"]}
        return Response(start["status"], response, b"".join(message.get("body", b"") for message in rest))


@contextlib.asynccontextmanager
async def world(
    *answers: Answer,
    limits: tuple[int, int] = (0, 0),
    keys: tuple[str, ...] = (),
    servers_key: str = "",
    hedge_after_s: float = 0.0,
    pd_min_tokens: int = 0,
) -> AsyncIterator[World]:
    """Run servers with these answers, and a router that considers all of them healthy."""
    loop = asyncio.get_running_loop()
    ups, listening = [Upstream(answer) for answer in answers], []
    for up in ups:
        listening.append(await asyncio.start_server(up.take, "127.0.0.1", 0))
        up.url = f"http://127.0.0.1:{listening[-1].sockets[0].getsockname()[1]}"
    servers = Servers("prefix", pd_min_tokens=pd_min_tokens)
    servers.set_urls([up.url for up in ups], 2.0)
    for server in servers:
        server.set_trouble("")
    timeouts = ProxyTimeouts(0.2, 10.0, Hedging(hedge_after_s))
    keys_guard = Keys(keys, OPEN_PATHS.__contains__)
    access_policy = AccessPolicy(keys_guard, Limits(*limits, loop.time), BodyBuffers(1 << 20), servers_key)
    yield World(RouterApp(servers, RouterMetrics(servers), timeouts, access_policy), servers, ups)
    for server in servers:
        server.pool.close_connections()
    for _ in range(4):  # loop iterations until an accepted connection has its task
        await asyncio.sleep(0)
    for listener in listening:
        listener.close()
    for up in ups:
        await asyncio.gather(*up.tasks)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def by_path(**answers: Answer) -> Answer:
    """Answer by path: ``begin``, ``resume`` (stream of another server) or ``rest`` (of its own stream)."""

    async def answer(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        path = received["path"]
        kind = "rest" if path.startswith("/v1/streams/") else "resume" if path == "/v1/streams" else "begin"
        await answers.get(kind, respond(head(404, kind=b"application/json") + b"{}"))(up, received, writer)

    return answer


def texts(response: Response) -> list[str]:
    lines = [line[6:] for line in response.body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line).get("text") or line.decode() for line in lines]


BUSY = respond(head(503, kind=b"application/json") + b"{}")
LOST = by_path(begin=respond(head(200, TICKET), event(0), event(1), event(2)[:20], cut=True))
"""The first server in the list is chosen second."""


@pytest.mark.parametrize("iterations", range(4))
def test_world_closes_pending_connections(iterations: int) -> None:
    async def scenario() -> None:
        async with world(whole) as w:
            target = Target.parse(w.ups[0].url)
            with socket.create_connection((target.host, target.port)):
                for _ in range(iterations):
                    await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as warned:
        run(scenario())
        gc.collect()
    assert not warned


def test_unanswered_request_is_retried_elsewhere() -> None:
    async def scenario() -> None:
        for lost in (respond(cut=True), BUSY, respond(head(200), cut=True)):
            async with world(whole, lost) as w:
                for body in ({"prompt": "x"}, STREAM):
                    assert (await w.request(C, body)).body == b'{"ok":true}'
                assert len(w.ups[0].received) == 2 and w.ups[1].received
        async with world(respond(head(429, b"retry-after: 3", kind=b"application/json") + b"{}"), BUSY) as w:
            refused = await w.request(C, {"prompt": "x"})
            assert (refused.status, refused.headers["retry-after"]) == (429, "3")
            assert all(len(up.received) == 1 for up in w.ups)

    run(scenario())


@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_non_idempotent_request_is_not_retried(prefix: str) -> None:
    async def scenario() -> None:
        async with world(whole, respond(cut=True)) as w:
            response = await w.request(prefix + "/v1/conversations", {})
            assert response.status == 503 and "may have executed" in response.body.decode()
            assert not w.ups[0].received

    run(scenario())


def test_stored_object_is_found_at_its_server() -> None:
    async def scenario() -> None:
        async with world(whole, respond(head(404, kind=b"application/json") + b"{}")) as w:
            assert (await w.request("/openai/v1/responses/resp_1", None, "GET")).body == b'{"ok":true}'
            assert (await w.request(C, STREAM, last_event_id="a1-b2:1")).body == b'{"ok":true}'

    run(scenario())


def test_unreachable_servers_give_an_error_in_the_apis_format() -> None:
    async def scenario() -> None:
        async with world(whole) as w:
            next(iter(w.servers)).set_trouble("does not answer")
            for path, kind in ((C, "ServiceUnavailableError"), (M, "overloaded_error")):
                response = await w.request(path, {})
                assert response.status == 503 and json.loads(response.body)["error"]["type"] == kind
                assert "does not answer" in response.body.decode() and response.headers["retry-after"] == "1"
            assert (await w.request("/readyz", None, "GET")).status == 503
            assert (await w.request("/livez", None, "GET")).status == 200

    run(scenario())


@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_stream_resumes_at_another_server_with_its_tokens(prefix: str) -> None:
    async def scenario() -> None:
        second = by_path(resume=respond(head(200, TICKET), event(2, "c3-d4"), event(3, "c3-d4") + DONE))
        async with world(second, LOST) as w:
            response = await w.request(prefix + C, STREAM)
            assert texts(response) == ["t0", "t1", "t2", "t3"] and response.body.endswith(DONE)
            assert b": ids" not in response.body and "x-quintet-relay" not in response.headers
            begun, rest = w.ups[1].received
            assert begun["headers"]["x-quintet-relay"] == "1"
            assert (rest["method"], rest["path"]) == ("GET", "/v1/streams/a1-b2?from=2")
            assert json.loads(w.ups[0].received[0]["body"]) == {
                "path": C, "request": STREAM, "position": "2", "outputs": [[100, 101]], "seeds": [7], "created": 1_700_000_000,
                "name": "",
            }  # fmt: skip
            assert all(server.num_open == server.num_queued == 0 for server in w.servers)

    run(scenario())


def test_stream_resumes_at_the_same_live_server() -> None:
    async def scenario() -> None:
        alive = by_path(
            begin=respond(head(200, TICKET), event(0), cut=True),
            rest=respond(head(200, TICKET), event(1), event(2), DONE),
        )
        async with world(whole, alive) as w:
            assert texts(await w.request(C, STREAM)) == ["t0", "t1", "t2"]
            assert not w.ups[0].received

    run(scenario())


def test_stream_resumes_twice() -> None:
    async def scenario() -> None:
        more = [event(number, "c3-d4") for number in range(2, 20)]
        again = by_path(resume=respond(head(200, TICKET), b"".join(more), cut=True))
        last = by_path(resume=respond(head(200, TICKET), event(20, "e5-f6") + DONE))
        async with world(last, again, LOST) as w:
            for server in w.servers:
                server.update_load({w.ups[2].url: 0, w.ups[1].url: 10, w.ups[0].url: 20}[server.url], 0)
            assert texts(await w.request(C, STREAM)) == [f"t{number}" for number in range(21)]
            assert json.loads(w.ups[0].received[0]["body"])["outputs"] == [[*range(100, 120)]]

    run(scenario())


def test_request_that_kills_servers_is_limited_to_two() -> None:
    async def scenario() -> None:
        dies = by_path(
            begin=respond(cut=True), resume=respond(head(200, TICKET), event(2, "c3-d4"), cut=True)
        )
        for first in (dies, LOST):
            async with world(dies, dies, dies, first) as w:
                for server in w.servers:
                    server.update_load(0 if server.url == w.ups[3].url else 10, 0)
                response = await w.request(C, STREAM)
                assert "2 servers were lost" in response.body.decode()
                assert sum(bool(up.received) for up in w.ups) == 2

    run(scenario())


def test_retries_at_full_servers_are_limited() -> None:
    async def scenario() -> None:
        async with world(*[BUSY] * 5) as w:
            assert (await w.request(C, {"prompt": "x"})).status == 503
            assert sum(len(up.received) for up in w.ups) == 3

    run(scenario())


def test_disconnect_cancels_the_request() -> None:
    async def scenario() -> None:
        closed = asyncio.Event()

        async def endless(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(head(200, TICKET) + event(0))
                while True:
                    writer.write(b": keep-alive\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            closed.set()

        async with world(endless) as w:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(w.request(C, STREAM, disconnects=True), 5)
            await asyncio.wait_for(closed.wait(), 5)
            assert next(iter(w.servers)).num_open == 0

    run(scenario())


def test_slow_client_applies_backpressure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        num_sent, total = 0, 200
        is_held, pause = asyncio.Event(), Connection.pause

        def note_pause(connection: Connection, is_full: bool) -> None:
            pause(connection, is_full)
            if is_full:
                is_held.set()

        monkeypatch.setattr(Connection, "pause", note_pause)

        async def much(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            writer.write(head(200))
            for num_sent in range(total):  # noqa: B007 - read by the test
                writer.write(b"data: " + b"x" * (1 << 17) + b"\n\n")
                await writer.drain()
            writer.write(DONE)

        async with world(much) as w:
            reads = asyncio.Event()
            asking = asyncio.ensure_future(w.request(C, STREAM, reads=reads))
            await is_held.wait()
            last = -1
            # The router has paused. Socket buffers still fill, until the server makes no progress.
            while num_sent != last or num_sent == 0:
                last = num_sent
                await asyncio.sleep(0.1)
            assert num_sent < total / 2
            reads.set()
            assert len((await asking).body) == total * ((1 << 17) + 8) + len(DONE)

    run(scenario())


def test_unresumable_stream_ends_with_an_error() -> None:
    async def scenario() -> None:
        silent = by_path(
            begin=respond(head(200), event(0, ids=False), cut=True)
        )  # without a seed: not resumable
        for path in (C, M):
            async with world(whole, silent) as w:
                response = await w.request(path, STREAM)
                assert response.status == 200 and response.body.startswith(event(0, ids=False))
                assert "no server can resume" in response.body.decode()
                assert (b"event: error" in response.body) == (path == M)

    run(scenario())


def test_requests_with_one_prefix_go_to_one_server() -> None:
    async def scenario() -> None:
        async with world(whole, whole) as w:
            for _ in range(6):
                assert (await w.request(C, {"prompt": "a" * 4000})).status == 200
            assert sorted(len(up.received) for up in w.ups) == [0, 6]
            for number in range(6):
                await w.request(C, {"prompt": f"{number}"})
            assert min(len(up.received) for up in w.ups) >= 3

    run(scenario())


def test_limits_apply_per_key() -> None:
    async def scenario() -> None:
        async with world(whole, limits=(0, 2), keys=("k", "l")) as w:
            assert (await w.request(C, {})).status == (await w.request("/metrics", None, "GET")).status == 401
            assert (await w.request("/livez", None, "GET")).status == 200
            for _ in range(2):
                assert (await w.request(C, {}, authorization="Bearer k")).status == 200
            refused = await w.request(C, {}, authorization="Bearer k")
            assert refused.status == 429 and int(refused.headers["retry-after"]) <= 31
            assert (await w.request(C, {}, authorization="Bearer l")).status == 200

    run(scenario())
    limits = Limits(1, 0, lambda: 0.0)
    held = limits.begin_request(b"a")
    with pytest.raises(RequestError, match="at most 1 are allowed"):
        limits.begin_request(b"a")
    limits.end_request(held)
    limits.end_request(limits.begin_request(b"a"))


def test_server_list_file_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with world(whole, whole) as w:
            file = tmp_path / "servers"
            first, second = (up.url for up in w.ups)
            file.write_text(f"# ours\n{first}  # the first\n\n")
            servers = Servers("load")
            watch = Watch(servers, [], file, Pulse(0.01, 5, 5, "", 2.0))
            task = asyncio.get_running_loop().create_task(watch.run())

            async def write_urls(*urls: str) -> None:
                while [server.url for server in servers.usable] != [*urls]:
                    await asyncio.sleep(0.01)

            await write_urls(first)
            file.write_text(f"{first}\n{second}\n")
            await write_urls(first, second)
            held = servers.hold(next(iter(servers)))
            file.write_text(f"{second}\n")
            await write_urls(second)
            assert len(list(servers)) == 2, "the first server has requests in flight"
            held.release()
            while len(list(servers)) == 2:
                await asyncio.sleep(0.01)
            file.write_text("ftp://nowhere\n")
            os.utime(file, ns=(1, 1))
            while "the server list is unchanged" not in caplog.text:
                await asyncio.sleep(0.01)
            assert [server.url for server in servers.usable] == [second]
            task.cancel()
            for server in servers:
                server.pool.close_connections()

    run(scenario())


def test_unready_server_gets_no_requests() -> None:
    async def scenario() -> None:
        state = {"status": 503, "metrics": b""}

        async def answer(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            status = 200 if received["path"] == "/metrics" else state["status"]
            writer.write(
                head(int(str(status)), kind=b"text/plain")
                + (state["metrics"] if received["path"] == "/metrics" else b"why")
            )  # type: ignore[operator]

        async with world(answer) as w:
            (server,) = w.servers
            watch = Watch(w.servers, [server.url], None, Pulse(0.01, 0.05, 0.05, "", 0.5))
            task = asyncio.get_running_loop().create_task(watch.run())

            async def until(trouble: str) -> None:
                while trouble not in server.trouble or bool(trouble) != bool(server.trouble):
                    await asyncio.sleep(0.01)

            await until("not ready: why")
            state["status"] = 200
            await until("")
            state["metrics"] = (
                b'vllm:num_requests_running{engine="0"} 3\nvllm:generation_tokens_total{engine="0"} 5\n'
            )
            await until("no progress")
            assert server.num_others == 3
            state["metrics"] = b'vllm:num_requests_running{engine="0"} 0\n'
            await until("")
            task.cancel()

    run(scenario())


def test_server_without_metrics_is_healthy_and_prompts_count_as_queued() -> None:
    async def scenario() -> None:
        num_polls = 0

        async def answer(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_polls
            num_polls += received["path"] == "/metrics"
            writer.write(head(401 if received["path"] == "/metrics" else 200, kind=b"text/plain"))

        async with world(answer) as w:
            (server,) = w.servers
            held = w.servers.hold(server, num_queued=7)
            watch = Watch(w.servers, [server.url], None, Pulse(0.01, 5, 1e-9, "", 2.0))
            task = asyncio.get_running_loop().create_task(watch.run())
            while num_polls < 4:
                await asyncio.sleep(0.01)
            assert (server.num_queued, server.num_others, server.trouble) == (7, 0, "")
            held.release()
            task.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "name them with --engine URL"),
        (["--engine-dns", "http://a", "--drain-timeout", "0"], "--drain-timeout is 0"),
        (["--engine", "http://a", "--drain-timeout", "0"], "--drain-timeout is 0"),
        (["--engine", "http://a", "--max-open-per-key", "-1"], "--max-open-per-key is -1"),
        (["--engine", "http://a", "--max-open-per-key", "4"], "list the keys with --api-key"),
    ],
)
def test_invalid_flags_are_rejected(words: list[str], complaint: str) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match=complaint):
        _check(parser.parse_args(["route", *words]))
