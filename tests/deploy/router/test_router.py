"""The router of servers, before servers of the test: where requests go, and what clients hear when a server is lost."""

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
from quintet.deploy.router.app import OPEN_PATHS, AccessPolicy, App
from quintet.deploy.router.attempts import Hedging
from quintet.deploy.router.connection_pool import ConnectionPool
from quintet.deploy.router.events import Events
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import Pulse, Watch
from quintet.deploy.tools.load_client.connection import Connection, Target
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.wire.errors import ConfigError, RequestError

C, M = "/v1/completions", "/v1/messages"
STREAM = {"prompt": "x", "stream": True}
Answer = Callable[["Upstream", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(number: int, stream: str = "a1-b2", ids: bool = True) -> bytes:
    """Return the event of one token, as a server that is asked for it tells it."""
    note = b": ids 0 [%d]\n" % (100 + number) if ids else b""
    return note + b'id: %b:%d\ndata: {"text":"t%d"}\n\n' % (stream.encode(), number + 1, number)


DONE = b"data: [DONE]\n\n"


def head(status: int = 200, *headers: bytes, kind: bytes = b"text/event-stream") -> bytes:
    lines = [b"HTTP/1.1 %d x" % status, b"content-type: " + kind, *headers]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])


TICKET = b"x-quintet-relay: 7.1700000000"


@dataclass
class Upstream:
    """A server that answers as the test says, and keeps what it was asked."""

    answer: Answer
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    keeps: bool = False
    """Whether it takes another request on a connection."""

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer on a new connection, in a task that is known from the first."""
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
        asked = {"method": method, "path": path, "headers": headers, "body": body}
        if path not in ("/readyz", "/metrics"):
            self.asked.append(asked)
        await self.answer(self, asked, writer)
        await writer.drain()


async def whole(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(head(kind=b"application/json") + b'{"ok":true}')


def says(*pieces: bytes, cut: bool = False) -> Answer:
    """Answer with these bytes; ``cut``: then hang up, and where nothing was said reset the connection."""

    async def answer(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pieces))  # no reset behind them: it could overtake what was not read yet
        if cut and pieces:
            writer.close()
        elif cut:
            writer.transport.abort()

    return answer


@dataclass
class Told:
    """What a client heard."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class World:
    """A router and its servers."""

    app: App
    servers: Servers
    ups: list[Upstream]

    async def ask(
        self,
        path: str,
        body: object,
        method: str = "POST",
        *,
        leaves: bool = False,
        reads: asyncio.Event | None = None,
        **headers: str,
    ) -> Told:
        """Be a client; one that ``leaves`` does so when the answer has begun, another may wait before it ``reads`` on."""
        sent: list[Any] = []
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait(
            {"type": "http.request", "body": content if method == "POST" else b"", "more_body": False}
        )
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *pairs],
        }  # fmt: skip

        async def send(message: Any) -> None:
            sent.append(message)
            if reads is not None:
                await reads.wait()
            if leaves:
                incoming.put_nowait({"type": "http.disconnect"})

        await self.app(scope, incoming.get, send)
        start, *rest = sent
        told = {k.decode(): v.decode() for k, v in start["headers"]}
        return Told(start["status"], told, b"".join(message.get("body", b"") for message in rest))


@contextlib.asynccontextmanager
async def world(
    *answers: Answer,
    limits: tuple[int, int] = (0, 0),
    keys: tuple[str, ...] = (),
    servers_key: str = "",
    hedge_after_s: float = 0.0,
    pd_min_tokens: int = 0,
) -> AsyncIterator[World]:
    """Run servers with these answers, and a router before them that believes all of them to be well."""
    loop = asyncio.get_running_loop()
    ups, listening = [Upstream(answer) for answer in answers], []
    for up in ups:
        listening.append(await asyncio.start_server(up.take, "127.0.0.1", 0))
        up.url = f"http://127.0.0.1:{listening[-1].sockets[0].getsockname()[1]}"
    servers = Servers("prefix", pd_min_tokens=pd_min_tokens)
    servers.set_urls([up.url for up in ups], 2.0)
    for server in servers:
        server.set_trouble("")
    patience = ProxyTimeouts(0.2, 10.0, Hedging(hedge_after_s))
    guard = Keys(keys, OPEN_PATHS.__contains__)
    door = AccessPolicy(guard, Limits(*limits, loop.time), BodyBuffers(1 << 20), servers_key)
    yield World(App(servers, RouterMetrics(servers), patience, door), servers, ups)
    for server in servers:
        server.pool.hang_up()
    for _ in range(4):  # turns of the loop, until a connection that was accepted has its task
        await asyncio.sleep(0)
    for each in listening:
        each.close()
    for up in ups:
        await asyncio.gather(*up.tasks)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def by_path(**answers: Answer) -> Answer:
    """Answer by what is asked: to ``begin``, to ``go_on`` with a stream of another server, or for the ``rest`` of its own."""

    async def answer(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        path = asked["path"]
        kind = "rest" if path.startswith("/v1/streams/") else "go_on" if path == "/v1/streams" else "begin"
        await answers.get(kind, says(head(404, kind=b"application/json") + b"{}"))(up, asked, writer)

    return answer


def texts(told: Told) -> list[str]:
    lines = [line[6:] for line in told.body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line).get("text") or line.decode() for line in lines]


BUSY = says(head(503, kind=b"application/json") + b"{}")
LOST = by_path(begin=says(head(200, TICKET), event(0), event(1), event(2)[:20], cut=True))
"""Of two servers the one listed last is asked first."""


@pytest.mark.parametrize("turns", range(4))
def test_a_world_ends_behind_connections_that_came_last(turns: int) -> None:
    async def story() -> None:
        async with world(whole) as w:
            target = Target.parse(w.ups[0].url)
            with socket.create_connection((target.host, target.port)):
                for _ in range(turns):
                    await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as warned:
        run(story())
        gc.collect()
    assert not warned


def test_a_request_that_has_not_begun_goes_to_another_server() -> None:
    async def story() -> None:
        for lost in (says(cut=True), BUSY, says(head(200), cut=True)):
            async with world(whole, lost) as w:
                for body in ({"prompt": "x"}, STREAM):
                    assert (await w.ask(C, body)).body == b'{"ok":true}'
                assert len(w.ups[0].asked) == 2 and w.ups[1].asked
        async with world(says(head(429, b"retry-after: 3", kind=b"application/json") + b"{}"), BUSY) as w:
            refused = await w.ask(C, {"prompt": "x"})
            assert (refused.status, refused.headers["retry-after"]) == (429, "3")
            assert all(len(up.asked) == 1 for up in w.ups)

    run(story())


def test_what_must_not_be_done_twice_is_not_sent_twice() -> None:
    async def story() -> None:
        async with world(whole, says(cut=True)) as w:
            told = await w.ask("/v1/conversations", {})
            assert told.status == 503 and "may have executed" in told.body.decode() and not w.ups[0].asked

    run(story())


def test_what_one_server_knows_is_found_by_asking() -> None:
    async def story() -> None:
        async with world(whole, says(head(404, kind=b"application/json") + b"{}")) as w:
            assert (await w.ask("/v1/responses/resp_1", None, "GET")).body == b'{"ok":true}'
            assert (await w.ask(C, STREAM, last_event_id="a1-b2:1")).body == b'{"ok":true}'

    run(story())


def test_nobody_there_is_an_error_of_the_dialect() -> None:
    async def story() -> None:
        async with world(whole) as w:
            next(iter(w.servers)).set_trouble("does not answer")
            for path, kind in ((C, "ServiceUnavailableError"), (M, "overloaded_error")):
                told = await w.ask(path, {})
                assert told.status == 503 and json.loads(told.body)["error"]["type"] == kind
                assert "does not answer" in told.body.decode() and told.headers["retry-after"] == "1"
            assert (await w.ask("/readyz", None, "GET")).status == 503
            assert (await w.ask("/livez", None, "GET")).status == 200

    run(story())


def test_a_stream_goes_on_at_another_server_with_its_tokens() -> None:
    async def story() -> None:
        second = by_path(go_on=says(head(200, TICKET), event(2, "c3-d4"), event(3, "c3-d4") + DONE))
        async with world(second, LOST) as w:
            told = await w.ask(C, STREAM)
            assert texts(told) == ["t0", "t1", "t2", "t3"] and told.body.endswith(DONE)
            assert b": ids" not in told.body and "x-quintet-relay" not in told.headers
            begun, rest = w.ups[1].asked
            assert begun["headers"]["x-quintet-relay"] == "1"
            assert (rest["method"], rest["path"]) == ("GET", "/v1/streams/a1-b2?from=2")
            assert json.loads(w.ups[0].asked[0]["body"]) == {
                "path": C, "request": STREAM, "position": "2", "outputs": [[100, 101]], "seeds": [7], "created": 1_700_000_000,
                "name": "",
            }  # fmt: skip
            assert all(server.num_open == server.num_queued == 0 for server in w.servers)

    run(story())


def test_a_stream_goes_on_at_the_same_server_if_that_lives() -> None:
    async def story() -> None:
        alive = by_path(
            begin=says(head(200, TICKET), event(0), cut=True),
            rest=says(head(200, TICKET), event(1), event(2), DONE),
        )
        async with world(whole, alive) as w:
            assert texts(await w.ask(C, STREAM)) == ["t0", "t1", "t2"]
            assert not w.ups[0].asked

    run(story())


def test_a_stream_that_is_lost_twice_goes_on_twice() -> None:
    async def story() -> None:
        more = [event(number, "c3-d4") for number in range(2, 20)]
        again = by_path(go_on=says(head(200, TICKET), b"".join(more), cut=True))
        last = by_path(go_on=says(head(200, TICKET), event(20, "e5-f6") + DONE))
        async with world(last, again, LOST) as w:
            for server in w.servers:
                server.update_load({w.ups[2].url: 0, w.ups[1].url: 10, w.ups[0].url: 20}[server.url], 0)
            assert texts(await w.ask(C, STREAM)) == [f"t{number}" for number in range(21)]
            assert json.loads(w.ups[0].asked[0]["body"])["outputs"] == [[*range(100, 120)]]

    run(story())


def test_what_servers_are_lost_of_does_not_visit_them_all() -> None:
    async def story() -> None:
        dies = by_path(begin=says(cut=True), go_on=says(head(200, TICKET), event(2, "c3-d4"), cut=True))
        for first in (dies, LOST):
            async with world(dies, dies, dies, first) as w:
                for server in w.servers:
                    server.update_load(0 if server.url == w.ups[3].url else 10, 0)
                told = await w.ask(C, STREAM)
                assert "2 servers were lost" in told.body.decode()
                assert sum(bool(up.asked) for up in w.ups) == 2

    run(story())


def test_servers_that_are_full_are_not_all_asked() -> None:
    async def story() -> None:
        async with world(*[BUSY] * 5) as w:
            assert (await w.ask(C, {"prompt": "x"})).status == 503
            assert sum(len(up.asked) for up in w.ups) == 3

    run(story())


def test_a_client_that_leaves_takes_its_request_along() -> None:
    async def story() -> None:
        closed = asyncio.Event()

        async def endless(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(head(200, TICKET) + event(0))
                while True:
                    writer.write(b": keep-alive\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            closed.set()

        async with world(endless) as w:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(w.ask(C, STREAM, leaves=True), 5)
            await asyncio.wait_for(closed.wait(), 5)
            assert next(iter(w.servers)).num_open == 0

    run(story())


def test_a_client_that_reads_slowly_holds_its_server_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        num_sent, total = 0, 200
        is_held, pause = asyncio.Event(), Connection.pause

        def note_pause(connection: Connection, is_full: bool) -> None:
            pause(connection, is_full)
            if is_full:
                is_held.set()

        monkeypatch.setattr(Connection, "pause", note_pause)

        async def much(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            writer.write(head(200))
            for num_sent in range(total):  # noqa: B007 - told to the test
                writer.write(b"data: " + b"x" * (1 << 17) + b"\n\n")
                await writer.drain()
            writer.write(DONE)

        async with world(much) as w:
            reads = asyncio.Event()
            asking = asyncio.ensure_future(w.ask(C, STREAM, reads=reads))
            await is_held.wait()
            last = -1
            # The router has paused. Until the server comes no further: what sockets' buffers take still goes out.
            while num_sent != last or num_sent == 0:
                last = num_sent
                await asyncio.sleep(0.1)
            assert num_sent < total / 2
            reads.set()
            assert len((await asking).body) == total * ((1 << 17) + 8) + len(DONE)

    run(story())


def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error() -> None:
    async def story() -> None:
        silent = by_path(
            begin=says(head(200), event(0, ids=False), cut=True)
        )  # names no seed: not one of ours
        for path in (C, M):
            async with world(whole, silent) as w:
                told = await w.ask(path, STREAM)
                assert told.status == 200 and told.body.startswith(event(0, ids=False))
                assert "no server can resume" in told.body.decode()
                assert (b"event: error" in told.body) == (path == M)

    run(story())


def test_requests_with_one_beginning_go_to_one_server() -> None:
    async def story() -> None:
        async with world(whole, whole) as w:
            for _ in range(6):
                assert (await w.ask(C, {"prompt": "a" * 4000})).status == 200
            assert sorted(len(up.asked) for up in w.ups) == [0, 6]
            for number in range(6):
                await w.ask(C, {"prompt": f"{number}"})
            assert min(len(up.asked) for up in w.ups) >= 3

    run(story())


def test_a_key_has_its_limits_and_others_have_theirs() -> None:
    async def story() -> None:
        async with world(whole, limits=(0, 2), keys=("k", "l")) as w:
            assert (await w.ask(C, {})).status == (await w.ask("/metrics", None, "GET")).status == 401
            assert (await w.ask("/livez", None, "GET")).status == 200
            for _ in range(2):
                assert (await w.ask(C, {}, authorization="Bearer k")).status == 200
            refused = await w.ask(C, {}, authorization="Bearer k")
            assert refused.status == 429 and int(refused.headers["retry-after"]) <= 31
            assert (await w.ask(C, {}, authorization="Bearer l")).status == 200

    run(story())
    limits = Limits(1, 0, lambda: 0.0)
    held = limits.enter(b"a")
    with pytest.raises(RequestError, match="at most 1 are allowed"):
        limits.enter(b"a")
    limits.leave(held)
    limits.leave(limits.enter(b"a"))


def test_events_go_through_whole_however_they_are_cut() -> None:
    said = event(0) + b": keep-alive\n" + event(1) + DONE
    plain = event(0, ids=False) + b": keep-alive\n" + event(1, ids=False) + DONE
    for size in (1, 7, 64, len(said)):
        events, told = Events(is_relayed=True), b""
        for at in range(0, len(said), size):
            piece = events.take(said[at : at + size])
            assert not piece or piece.endswith(b"\n")
            told += piece
        assert told == plain and events.is_over
        assert events.take_resume_state() == ("a1-b2", "2", [[100, 101]])
    assert Events(is_relayed=False).take(b": keep-alive\n") == b": keep-alive\n"
    assert Events(is_relayed=False).take_resume_state() is None


def test_the_list_of_servers_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with world(whole, whole) as w:
            file = tmp_path / "servers"
            first, second = (up.url for up in w.ups)
            file.write_text(f"# ours\n{first}  # the first\n\n")
            servers = Servers("load")
            watch = Watch(servers, [], file, Pulse(0.01, 5, 5, "", 2.0))
            task = asyncio.get_running_loop().create_task(watch.run())

            async def become(*urls: str) -> None:
                while [server.url for server in servers.usable] != [*urls]:
                    await asyncio.sleep(0.01)

            await become(first)
            file.write_text(f"{first}\n{second}\n")
            await become(first, second)
            held = servers.hold(next(iter(servers)))
            file.write_text(f"{second}\n")
            await become(second)
            assert len(list(servers)) == 2, "the first has something to finish"
            held.leave()
            while len(list(servers)) == 2:
                await asyncio.sleep(0.01)
            file.write_text("ftp://nowhere\n")
            os.utime(file, ns=(1, 1))
            while "the server list is unchanged" not in caplog.text:
                await asyncio.sleep(0.01)
            assert [server.url for server in servers.usable] == [second]
            task.cancel()
            for server in servers:
                server.pool.hang_up()

    run(story())


def test_a_server_that_cannot_take_requests_gets_none_until_it_can() -> None:
    async def story() -> None:
        state = {"status": 503, "metrics": b""}

        async def answer(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            status = 200 if asked["path"] == "/metrics" else state["status"]
            writer.write(
                head(int(str(status)), kind=b"text/plain")
                + (state["metrics"] if asked["path"] == "/metrics" else b"why")
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

    run(story())


def test_a_server_that_keeps_its_figures_to_itself_is_well_and_its_prompts_count_as_queued() -> None:
    async def story() -> None:
        num_asked = 0

        async def answer(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            num_asked += asked["path"] == "/metrics"
            writer.write(head(401 if asked["path"] == "/metrics" else 200, kind=b"text/plain"))

        async with world(answer) as w:
            (server,) = w.servers
            held = w.servers.hold(server, num_queued=7)
            watch = Watch(w.servers, [server.url], None, Pulse(0.01, 5, 1e-9, "", 2.0))
            task = asyncio.get_running_loop().create_task(watch.run())
            while num_asked < 4:
                await asyncio.sleep(0.01)
            assert (server.num_queued, server.num_others, server.trouble) == (7, 0, "")
            held.leave()
            task.cancel()

    run(story())


def test_a_server_that_only_says_it_is_there_makes_no_progress() -> None:
    async def story() -> None:
        lines = ConnectionPool(Target.parse("http://127.0.0.1:1"), 1.0)
        for piece in (b": keep-alive\n", b": ping\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'):
            lines.record_piece(piece, 1.0)
            assert (lines.last_received_s, lines.last_event_s) == (1.0, 0.0)
        for piece in (event(0), b": ping\n\ndata: {}\n\n", b"data: {}\n\n"):
            lines.last_event_s = 0.0
            lines.record_piece(piece, 1.0)
            assert lines.last_event_s == 1.0

    run(story())


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
def test_what_cannot_be_asked_of_the_router(words: list[str], complaint: str) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match=complaint):
        _check(parser.parse_args(["route", *words]))
