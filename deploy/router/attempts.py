"""Attempts of a request at servers, and request hedging: a second attempt if the first is slow to start.

Hedging (Dean and Barroso, The tail at scale, 2013) also sends a request that waits unusually long to another server. The
first answer wins. The router closes the other connection, which cancels the request on that server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quintet.deploy.http_client.pool import ResponseFlow, Unreachable
from quintet.deploy.router.servers import HeldPrefixes, Server
from quintet.deploy.router.upstream import Outgoing

MAX_HEDGED = 0.05
"""Share of requests that may be hedged: under overload, hedges would add load."""
MAX_SAVED = 5.0
"""Maximum hedges in a row after an idle time."""
MIN_ERROR = 400
"""Minimum status of an error. A hedge that fails at once must not win over the first attempt in progress."""


class Attempt:
    def __init__(self, held: HeldPrefixes) -> None:
        self.held = held
        self.flow: ResponseFlow | None = None
        self.is_cancelled = False
        """True once the client has disconnected."""

    async def send(self, outgoing: Outgoing, is_fresh: bool = False) -> ResponseFlow:
        """Send the request and wait for the answer's head. ``is_fresh`` opens a new connection. Raises `ConnectionError`."""
        pool = self.held.server.pool
        while True:
            flow = self.flow = await pool.send(outgoing.bytes_for(pool.target), is_fresh=is_fresh)
            if self.is_cancelled:  # the client disconnected during the connect
                flow.connection.close()
            try:
                await flow.head()
            except ConnectionError:
                is_stale = pool.was_stale(flow)
                pool.give_back(flow)
                if is_stale and not self.is_cancelled:
                    is_fresh = True
                    continue
                raise
            return flow

    def cancel(self) -> None:
        """Close the connection because the client has disconnected; this cancels the request on the server."""
        self.is_cancelled = True
        if self.flow is not None:
            self.flow.connection.close()

    def release(self) -> None:
        """End the attempt and return its connection to the pool."""
        self.held.release()
        if self.flow is not None:
            self.held.server.pool.give_back(self.flow)


@dataclass(slots=True)
class Hedging:
    """Hedging delay and budget (token bucket): each request adds a fraction of one hedge."""

    after_s: float = 0.0
    """Delay without an answer before a hedge is sent; 0 disables hedging."""
    _saved: float = 1.0
    """Hedges available now."""

    def earn(self) -> None:
        self._saved = min(MAX_SAVED, self._saved + MAX_HEDGED)

    def is_allowed(self) -> bool:
        return self._saved >= 1

    def spend(self) -> None:
        self._saved -= 1


class HedgedAttempt:
    """An attempt and its optional hedge. The first answer wins, except a retryable refusal, a loss or an error of the hedge."""

    def __init__(
        self, first: Attempt, outgoing: Outgoing, is_refusal: Callable[[ResponseFlow], bool]
    ) -> None:
        self._outgoing, self._is_refusal = outgoing, is_refusal
        self._tasks: dict[asyncio.Task[ResponseFlow], Attempt] = {}
        self.lost: list[tuple[Server, Exception]] = []
        """Servers of losing attempts that were lost while they had the request, with the error."""
        self._enter(first)

    def _enter(self, attempt: Attempt) -> None:
        self._tasks[asyncio.get_running_loop().create_task(attempt.send(self._outgoing))] = attempt

    async def wait_started(self, within_s: float) -> bool:
        """Wait at most ``within_s`` for the answer or a failure; return whether one came."""
        done, _ = await asyncio.wait(self._tasks, timeout=within_s)
        return bool(done)

    async def run(self, copy: Attempt | None) -> tuple[Attempt, asyncio.Task[ResponseFlow]]:
        """Return the winner and its finished task, and release the loser. The first attempt wins if both fail."""
        if copy is not None:
            self._enter(copy)
        waiting = set(self._tasks)
        won = first = next(iter(self._tasks))
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answered = [task for task in done if task.exception() is None]
            started = [task for task in answered if self._can_win(task.result(), task is first)]
            if started:
                won = first if first in started else started[0]
                break
        for task, attempt in self._tasks.items():
            if task is not won:
                self._retire(task, attempt)
        return self._tasks[won], won

    def _can_win(self, flow: ResponseFlow, is_first: bool) -> bool:
        return not self._is_refusal(flow) if is_first else flow.status < MIN_ERROR

    def _retire(self, task: asyncio.Task[ResponseFlow], attempt: Attempt) -> None:
        """Release the loser, and record a lost or unreachable server."""
        server = attempt.held.server
        match task.exception() if task.done() else None:
            case Unreachable() as error:
                server.set_trouble(str(error))
            case Exception() as error:
                self.lost.append((server, error))
        task.cancel()
        attempt.release()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
