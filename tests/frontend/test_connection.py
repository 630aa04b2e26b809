"""HTTP/1 connections beyond the head: trailers, bodies of requests that were answered early, and pipelined requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.http import connection
from quintet.frontend.http.connection import MAX_HEADER_BYTES, Protocol

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
IDLE_S = 0.05


class Client:
    """Client side of one connection, and the protocol of the server side."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: Protocol
    ) -> None:
        self.reader, self.writer, self.protocol = reader, writer, protocol

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def response(self) -> tuple[int, bytes]:
        """Return the status and the body of the next response, which has a content length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)


@contextlib.asynccontextmanager
async def connected(app: Any, idle_s: float = 20.0) -> AsyncIterator[Client]:
    """Serve an ASGI application to one client."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False
    )
    config.timeout_keep_alive = cast(int, idle_s)
    made: list[Protocol] = []

    def make() -> Protocol:
        made.append(
            Protocol(
                write_timeout_s=20.0, header_timeout_s=20.0, errors=ERRORS,
                config=config, server_state=ServerState(), app_state={},
            )
        )  # fmt: skip
        return made[-1]

    server = await loop.create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await asyncio.sleep(0)
    while not made:
        await asyncio.sleep(0)
    try:
        yield Client(reader, writer, made[0])
    finally:
        writer.transport.abort()
        server.close()
        for task in made[0].tasks:
            task.cancel()
        await asyncio.gather(*made[0].tasks, return_exceptions=True)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def respond(send: Any, status: int, body: bytes = b"") -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, then answer with the names of the headers."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    if message["type"] == "http.request":
        await respond(send, 200, b" ".join(name for name, _ in scope["headers"]))


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await respond(send, 401)


@pytest.mark.parametrize(
    ("app", "is_answered", "line"),
    [(reading, False, b"y" * 4000), (refusing, True, b"x: " + b"y" * 4000 + b"\r\n")],
    ids=["one", "many"],
)
def test_the_size_of_trailers_is_bounded(app: Any, is_answered: bool, line: bytes) -> None:
    async def scenario() -> None:
        async with connected(app) as client:
            await client.send(CHUNKED + b"1\r\na\r\n0\r\nx-first: ")
            if is_answered:
                assert await client.response() == (401, b"")
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                while not client.reader.at_eof() and num_sent < 64 * MAX_HEADER_BYTES:
                    await client.send(line)
                    await asyncio.sleep(0)
                    num_sent += len(line)
            assert num_sent < 64 * MAX_HEADER_BYTES
            if not is_answered:
                with contextlib.suppress(ConnectionError):
                    assert (await client.response())[0] == 431

    run(scenario)


def test_trailers_are_not_headers() -> None:
    async def scenario() -> None:
        async with connected(reading) as client:
            await client.send(CHUNKED + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n")
            assert await client.response() == (200, b"host transfer-encoding")

    run(scenario)


def test_small_chunks_are_no_framing_overhead() -> None:
    async def scenario() -> None:
        async with connected(reading) as client:
            await client.send(CHUNKED + b"1\r\na\r\n" * MAX_HEADER_BYTES + b"0\r\n\r\n")
            assert (await client.response())[0] == 200

    run(scenario)


@pytest.mark.parametrize("rest", [b"a", b"a" * 9], ids=["incomplete", "complete"])
def test_a_connection_with_an_early_response_is_closed_when_idle(rest: bytes) -> None:
    async def scenario() -> None:
        async with connected(refusing, IDLE_S) as client:
            await client.send(POST + b"content-length: 10\r\n\r\na")
            assert await client.response() == (401, b"")
            await client.send(rest)
            assert await client.reader.read() == b""

    run(scenario)


def test_a_trickling_body_after_an_early_response_does_not_extend_the_idle_timeout() -> None:
    async def scenario() -> None:
        async with connected(refusing, IDLE_S) as client:
            await client.send(POST + b"content-length: 100000\r\n\r\na")
            assert await client.response() == (401, b"")
            with contextlib.suppress(ConnectionError):
                for _ in range(10_000):  # 10 s
                    await client.send(b"a")
                    if client.reader.at_eof():
                        return
                    await asyncio.sleep(0.001)
                raise AssertionError("the connection was not closed")

    run(scenario)


def test_a_connection_is_reused_after_the_body_of_an_early_response() -> None:
    async def scenario() -> None:
        async with connected(refusing) as client:
            await client.send(POST + b"content-length: 10\r\n\r\na")
            assert await client.response() == (401, b"")
            await client.send(b"a" * 9 + GET)
            assert await client.response() == (401, b"")

    run(scenario)


def test_garbage_after_an_early_response_gets_no_second_response() -> None:
    async def scenario() -> None:
        async with connected(refusing) as client:
            await client.send(CHUNKED + b"1\r\na\r\n")
            assert await client.response() == (401, b"")
            await client.send(b"no chunk size\r\n")
            assert await client.reader.read() == b""

    run(scenario)


def test_blank_lines_do_not_extend_the_idle_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_S", IDLE_S)

    async def scenario() -> None:
        async with connected(refusing) as client:
            await client.send(b"\r\n")
            assert await client.reader.read() == b""

    run(scenario)


def test_a_head_received_during_a_response_is_not_idle() -> None:
    is_first = True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            await go_on.wait()
        else:
            await asyncio.sleep(3 * IDLE_S)  # longer than the idle timeout, which must not apply
        await respond(send, 200)

    go_on = asyncio.Event()

    async def scenario() -> None:
        async with connected(app, IDLE_S) as client:
            await client.send(GET)
            while client.protocol.cycle is None:
                await asyncio.sleep(0)
            await client.send(GET[:-2])
            while client.protocol.cycle.scope is client.protocol.scope:  # until the second head begins
                await asyncio.sleep(0)
            go_on.set()
            assert await client.response() == (200, b"")
            await client.send(GET[-2:])
            assert await client.response() == (200, b"")

    run(scenario)


@pytest.mark.parametrize("parts", [[GET + GET], [GET, GET]], ids=["one read", "two reads"])
def test_a_disconnect_reaches_the_running_one_of_pipelined_requests(parts: list[bytes]) -> None:
    received: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            received.append(message["type"])
        received.append(message["type"])

    async def scenario() -> None:
        async with connected(app) as client:
            for part in parts:
                await client.send(part)
                while not received:
                    await asyncio.sleep(0)
            while not client.protocol.pipeline:
                await asyncio.sleep(0)
            client.writer.transport.abort()
            while received != ["http.request", "http.disconnect"]:
                await asyncio.sleep(0)

    run(scenario)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, 200, scope["raw_path"])

    async def scenario() -> None:
        async with connected(app) as client:
            await client.send(
                b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(50))
            )
            assert [await client.response() for _ in range(50)] == [(200, b"/%d" % n) for n in range(50)]

    run(scenario)


def test_the_number_of_pipelined_requests_is_bounded() -> None:
    async def scenario() -> None:
        async with connected(refusing) as client:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                for _ in range(1000):
                    await client.send(GET * 100)
                    await client.response()
                raise AssertionError("all requests were read and queued")

    run(scenario)
