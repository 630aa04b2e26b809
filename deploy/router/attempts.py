"""One copy of a request at one server: sent, waited for, let go; and a second copy where the first is slow to begin.

Dean and Barroso, The tail at scale, 2013: a request that has waited longer than nearly all do is asked of another server as
well, and whichever answers first is taken. The other's connection is closed, which ends what its server computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quintet.deploy.router.connection_pool import ResponseFlow, Unreachable
from quintet.deploy.router.servers import HeldPrefixes, Server
from quintet.deploy.router.upstream import Outgoing

MAX_HEDGED = 0.05
"""Share of requests that may get a second copy: where everything is slow, copies would make it slower."""
MAX_SAVED = 5.0
"""Copies that may be sent in a row after however long a quiet time."""
MIN_ERROR = 400
"""From this status on a copy's answer is no beginning: one refused at once must not beat what the first is making."""


class Attempt:
    """A request's stay at one server."""

    def __init__(self, held: HeldPrefixes) -> None:
        self.held = held
        self.flow: ResponseFlow | None = None
        self.is_gone = False
        """Whether its client is."""

    async def send(self, outgoing: Outgoing, is_fresh: bool = False) -> ResponseFlow:
        """Send it and wait for the head of its answer, over a new connection if ``is_fresh``. Raises `ConnectionError`."""
        lines = self.held.server.lines
        while True:
            flow = self.flow = await lines.send(outgoing.bytes_for(lines.target), is_fresh=is_fresh)
            if self.is_gone:  # while it connected
                flow.connection.close()
            try:
                await flow.head()
            except ConnectionError:
                is_stale = lines.was_stale(flow)
                lines.give_back(flow)
                if is_stale and not self.is_gone:
                    is_fresh = True
                    continue
                raise
            return flow

    def leave(self) -> None:
        """The client is gone: so is whoever computes for it."""
        self.is_gone = True
        if self.flow is not None:
            self.flow.connection.close()

    def let_go(self) -> None:
        """Leave the server."""
        self.held.leave()
        if self.flow is not None:
            self.held.server.lines.give_back(self.flow)


@dataclass(slots=True)
class Hedging:
    """When a second copy is sent, and how many may be: each request saves up a share of one."""

    after_s: float = 0.0
    """Without a sign of the answer; 0: never."""
    _saved: float = 1.0
    """Copies that may be sent now."""

    def earn(self) -> None:
        """Save up for one request, however often it is sent."""
        self._saved = min(MAX_SAVED, self._saved + MAX_HEDGED)

    def may(self) -> bool:
        """Whether a copy may be sent now."""
        return self._saved >= 1

    def spend(self) -> None:
        """Pay for a copy."""
        self._saved -= 1


class HedgedAttempt:
    """A request and its copy. Whoever begins to answer first has it; a refusal, a loss or the copy's error is none."""

    def __init__(
        self, first: Attempt, outgoing: Outgoing, is_refusal: Callable[[ResponseFlow], bool]
    ) -> None:
        self._outgoing, self._is_refusal = outgoing, is_refusal
        self._tasks: dict[asyncio.Task[ResponseFlow], Attempt] = {}
        self.lost: list[tuple[Server, Exception]] = []
        """Of who did not win: servers that were lost while they had the request, and how."""
        self._enter(first)

    def _enter(self, sending: Attempt) -> None:
        self._tasks[asyncio.get_running_loop().create_task(sending.send(self._outgoing))] = sending

    async def has_begun(self, within_s: float) -> bool:
        """Wait so long at most for the request to begin, or to fail."""
        done, _ = await asyncio.wait(self._tasks, timeout=within_s)
        return bool(done)

    async def run(self, copy: Attempt | None) -> tuple[Attempt, asyncio.Task[ResponseFlow]]:
        """Return who won, with its task, which is done; the other is let go. Without a copy, or where both fail, the first."""
        if copy is not None:
            self._enter(copy)
        waiting = set(self._tasks)
        won = first = next(iter(self._tasks))
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answered = [task for task in done if task.exception() is None]
            begun = [task for task in answered if self._is_beginning(task.result(), task is first)]
            if begun:
                won = first if first in begun else begun[0]
                break
        for task, sending in self._tasks.items():
            if task is not won:
                self._retire(task, sending)
        return self._tasks[won], won

    def _is_beginning(self, flow: ResponseFlow, is_first: bool) -> bool:
        return not self._is_refusal(flow) if is_first else flow.status < MIN_ERROR

    def _retire(self, task: asyncio.Task[ResponseFlow], sending: Attempt) -> None:
        """Let go of who did not win, and remember a server that was lost, or at which nobody listens."""
        server = sending.held.server
        match task.exception() if task.done() else None:
            case Unreachable() as error:
                server.note(str(error))
            case Exception() as error:
                self.lost.append((server, error))
        task.cancel()
        sending.let_go()

    def call_off(self) -> None:
        """End both: nobody waits."""
        for task in self._tasks:
            task.cancel()
