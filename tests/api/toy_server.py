"""Small asyncio HTTP server that answers each request with bytes of the test."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Script = Callable[[str, bytes, int], list[bytes] | None]
"""``(path, body, connection number) -> chunks to write, each flushed``; None closes without an answer."""


@dataclass(slots=True)
class ToyServer:
    """URL and received requests."""

    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    num_connections: int = 0


@contextmanager
def toy_server(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[ToyServer]:
    """Serve ``script`` on a free port of localhost, from a thread."""
    seen = ToyServer()
    loop = asyncio.new_event_loop()
    started = threading.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.num_connections += 1
        number = seen.num_connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (
                        int(line[15:])
                        for line in head.splitlines()
                        if line.lower().startswith("content-length:")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                path = head.split(" ")[1]
                seen.requests.append((path, body))
                pieces = script(path, body, number)
                if pieces is None:
                    writer.transport.abort()
                    return
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"Connection: close" in pieces[0]:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def main() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        host, port = server.sockets[0].getsockname()[:2]
        seen.url = f"http{'s' * (tls is not None)}://{host}:{port}"
        started.set()
        await stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(5)
    try:
        yield seen
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()


def frames(*contents: str) -> bytes:
    """Return server-sent events."""
    return b"".join(f"data: {content}\n\n".encode() for content in contents)


def chunked(*payloads: bytes) -> bytes:
    """Return a whole chunked 200 event stream, one chunk per payload."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in payloads) + b"0\r\n\r\n"


def sized(status: str, body: bytes, extra: str = "") -> bytes:
    """Return a whole JSON answer with a content length."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
