"""HTTP client of a peer: the server, or FastChat's controller."""

from __future__ import annotations

import asyncio

import msgspec

from quintet.deploy.router.connection_pool import ConnectionPool, ResponseFlow
from quintet.deploy.tools.load_client.connection import HttpAnswer, Target

CONNECT_S = 2.0


class Peer:
    """One peer, with its connection pool."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = ConnectionPool(target, CONNECT_S)

    def __str__(self) -> str:
        return f"{self._target.host}:{self._target.port}"

    async def send(self, method: str, path: str, body: object = None) -> ResponseFlow:
        """Send a request with a JSON body, and wait for the response head; call `release` later. Raises `ConnectionError`."""
        request = self._target.request(method, path, b"" if body is None else msgspec.json.encode(body))
        return await self._pool.open(request)

    def release(self, flow: ResponseFlow) -> None:
        """Release a response; the server aborts one that was not fully read."""
        self._pool.give_back(flow)

    async def ask(
        self, method: str, path: str, body: object = None, within_s: float | None = None
    ) -> HttpAnswer:
        """Send a request and return the full response. Raises `ConnectionError`, or `TimeoutError` after ``within_s``."""
        async with asyncio.timeout(within_s):
            flow = await self.send(method, path, body)
            try:
                return await flow.whole
            finally:
                self.release(flow)

    def hang_up(self) -> None:
        """Close all connections."""
        self._pool.hang_up()
