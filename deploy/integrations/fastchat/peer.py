"""Another program that is asked over HTTP: the server that computes, or FastChat's controller."""

from __future__ import annotations

import asyncio

import msgspec

from quintet.deploy.router.connection_pool import ConnectionPool, ResponseFlow
from quintet.deploy.tools.load_client.connection import HttpAnswer, Target

CONNECT_S = 2.0


class Peer:
    """One of them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lines = ConnectionPool(target, CONNECT_S)

    def __str__(self) -> str:
        return f"{self._target.host}:{self._target.port}"

    async def begin(self, method: str, path: str, body: object = None) -> ResponseFlow:
        """Send a request, ``body`` as JSON, and wait for the head of its answer; `leave` it. Raises `ConnectionError`."""
        request = self._target.request(method, path, b"" if body is None else msgspec.json.encode(body))
        is_fresh = False
        while True:
            flow = await self._lines.send(request, is_fresh=is_fresh)
            try:
                await flow.head()
            except BaseException as error:
                was_stale = isinstance(error, ConnectionError) and self._lines.was_stale(flow)
                self._lines.give_back(flow)
                if not was_stale or is_fresh:
                    raise
                is_fresh = True
                continue
            return flow

    def leave(self, flow: ResponseFlow) -> None:
        """Let go of an answer. One that was not read to its end is computed no further."""
        self._lines.give_back(flow)

    async def ask(
        self, method: str, path: str, body: object = None, within_s: float | None = None
    ) -> HttpAnswer:
        """Return a whole answer. Raises `ConnectionError`, or `TimeoutError` where it takes longer than ``within_s``."""
        async with asyncio.timeout(within_s):
            flow = await self.begin(method, path, body)
            try:
                return await flow.whole
            finally:
                self.leave(flow)

    def hang_up(self) -> None:
        """End every connection."""
        self._lines.hang_up()
