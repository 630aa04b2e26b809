"""The common limit of unfinished bodies also applies to decompressed bytes."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest
from starlette.types import Message

from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.http_request import HttpRequest
from quintet.wire.errors import ErrorCode, RequestError

HALF = b'"' + b"x" * 600_000 + b'"'


class Client:
    """An HTTP request, and the pieces of its body that arrive."""

    def __init__(self, encoding: bytes = b"identity") -> None:
        self.arrived: asyncio.Queue[Message] = asyncio.Queue()
        scope: Any = {
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": [(b"content-encoding", encoding)],
        }
        self.request = HttpRequest(scope, self.arrived.get, self._send, ERRORS)

    async def _send(self, message: Any) -> None:
        raise AssertionError

    def send(self, piece: bytes, *, is_last: bool) -> None:
        self.arrived.put_nowait({"type": "http.request", "body": piece, "more_body": not is_last})


def test_decompressed_bytes_give_up_an_idle_body() -> None:
    async def scenario() -> None:
        bodies = BodyBuffers(max_bytes=10_000_000, max_open_bytes=1_000_000)
        idle, packed = Client(), Client(b"gzip")
        idle.send(HALF, is_last=False)
        waiting = asyncio.ensure_future(idle.request.read_json_body(bodies))
        await asyncio.sleep(0)
        packed.send(gzip.compress(HALF), is_last=True)
        assert await packed.request.read_json_body(bodies) == HALF
        with pytest.raises(RequestError) as caught:
            await waiting
        assert caught.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_body_that_is_given_up_is_not_decompressed_further() -> None:
    async def scenario() -> None:
        bodies = BodyBuffers(max_bytes=10_000_000, max_open_bytes=1_000_000)
        packed = Client(b"gzip")
        packed.send(gzip.compress(HALF * 10), is_last=True)
        with pytest.raises(RequestError, match="Unfinished request bodies exceed 1000000 bytes"):
            await packed.request.read_json_body(bodies)
        assert bodies.num_open_bytes == 0

    asyncio.run(scenario())
