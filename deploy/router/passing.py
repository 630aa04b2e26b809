"""One request on its way through: a server is chosen, its answer passed on, and where the server is lost another goes on.

chosen ──▶ sent ──▶ begun ──▶ passed on ──▶ over
   ▲         │ lost, or it cannot now  │ lost
   └─────────┘                         └──▶ gone on with: at the same server if it lives, else at another, if the
                                            server told how (`events.py`); or ended with an error
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from quintet.deploy.router.asked import Asked
from quintet.deploy.router.events import Events
from quintet.deploy.router.figures import Figures
from quintet.deploy.router.lines import Flow, Unreachable
from quintet.deploy.router.servers import Held, Server, Servers
from quintet.deploy.router.upstream import RELAY, Outgoing, going_on, header_of, passed_on, the_rest
from quintet.frontend.exchange import ClientGone, Exchange
from quintet.frontend.streams import UNPROVEN_TOKENS
from quintet.wire.errors import ErrorCode, RequestError

ELSEWHERE = frozenset({429, 502, 503})
"""A server that answers so cannot now; another may."""
ONCE = "/v1/conversations"
"""What is done here twice is two things: it is sent again only where it was never received."""
KEPT = ("/v1/responses/", "/v1/conversations/", "/v1/streams/")
"""What only the server knows that has it: whoever does is found by asking."""
LAST_EVENT = b"last-event-id"
"""With it a client comes back for a stream by sending its request again."""
LOOK_S = 0.05
MAX_REFUSALS = 3
"""So many servers are asked while all answer that they cannot now: where all are full, asking makes it worse."""
MAX_LOST = 2
"""So many servers may be lost with a request that comes no further: it may be what they are lost of."""
_log = logging.getLogger("quintet")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the router waits."""

    first_s: float
    """For a server, while there is none."""
    resume_s: float
    """For a server to go on with a stream."""


class Passing:
    """One exchange."""

    def __init__(self, servers: Servers, figures: Figures, patience: Patience, exchange: Exchange) -> None:
        self._servers = servers
        self._figures = figures
        self._patience = patience
        self._exchange = exchange
        self._events = Events()
        self._ticket = b""
        self._held: Held | None = None
        self._flow: Flow | None = None
        self._is_gone = False
        self._tried: set[Server] = set()
        """Where the request was sent, and did not begin."""
        self._num_lost = 0
        """Servers that were lost with it since it last came further."""
        self._num_told = 0
        """Tokens that had been told when the last was lost."""

    async def answer(self, outgoing: Outgoing, asked: Asked) -> None:
        """Answer the client. Raises `RequestError` before anything was written, or `ClientGone`."""
        watcher = self._exchange.watch_disconnect(self._leave)
        try:
            flow = await self._begin(outgoing, asked)
            while flow.is_stream:
                if await self._pass_on(flow, outgoing, asked):
                    return
                self._let_go()
                self._figures.retries.inc()
                self._events = Events()
                flow = await self._begin(outgoing, asked)
            whole = await flow.whole
            await self._exchange.respond(
                whole.status,
                whole.body,
                header_of(flow.connection.headers, b"content-type") or b"application/json",
                passed_on(flow.connection.headers),
            )
        except (ConnectionError, asyncio.CancelledError):
            if self._is_gone:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()
            self._let_go()

    def _leave(self) -> None:
        """The client is gone: so is whoever computes for it."""
        self._is_gone = True
        if self._flow is not None:
            self._flow.connection.close()

    # --- before the first byte --------------------------------------------------------------------------------

    async def _begin(self, outgoing: Outgoing, asked: Asked) -> Flow:
        """Return the flow of an answer of which the head has come, or all of it."""
        tried = self._tried
        refused: list[Flow] = []
        until_s = time.monotonic() + self._patience.first_s
        is_kept = outgoing.path.startswith(KEPT) or any(name == LAST_EVENT for name, _ in outgoing.headers)
        while True:
            if self._is_gone:
                raise ClientGone
            held = None if len(refused) == MAX_REFUSALS else self._servers.choose(asked, tried)
            if held is None:
                if refused:
                    return refused[-1]
                if tried or time.monotonic() > until_s:
                    raise self._nobody(tried)
                await asyncio.sleep(LOOK_S)
                continue
            tried.add(held.server)
            if len(tried) > 1:
                self._figures.retries.inc()
            try:
                flow = await self._send(held, outgoing)
            except Unreachable as error:
                held.server.note(str(error))
                self._let_go()
                continue
            except ConnectionError as error:
                self._let_go()
                if self._is_gone:
                    raise ClientGone from None
                _log.info("%s: %s; it had request %s", held.server.url, error, outgoing.request_id)
                self._note_loss(0)
                if outgoing.path.startswith(ONCE):
                    raise RequestError(
                        ErrorCode.UNAVAILABLE,
                        "The server was lost while it answered; it may have done what was asked.",
                    ) from None
                continue
            status = flow.connection.status
            self._figures.answered(held.server.url, status)
            if is_kept and status == 404:
                refused[:] = [flow]
            elif status in ELSEWHERE:
                refused.append(flow)
            else:
                self._figures.first_byte.observe((time.monotonic_ns() - self._exchange.arrival_ns) * 1e-9)
                return flow
            self._let_go()

    async def _send(self, held: Held, outgoing: Outgoing) -> Flow:
        """Send to a server and wait for the head of its answer. Raises `ConnectionError`."""
        self._held = held
        lines = held.server.lines
        while True:
            flow = self._flow = await lines.send(outgoing.bytes_for(lines.target))
            if self._is_gone:  # while it connected
                flow.connection.close()
            try:
                await flow.head()
            except ConnectionError:
                is_stale = flow.connection.num_exchanges > 1 and not flow.connection.heard
                lines.give_back(flow)
                if is_stale and not self._is_gone:
                    continue  # the server hung up on an idle connection
                raise
            return flow

    def _let_go(self) -> None:
        """Leave the server that has the request."""
        held, flow = self._held, self._flow
        self._held = self._flow = None
        if held is not None:
            held.leave()
            if flow is not None:
                held.server.lines.give_back(flow)

    def _note_loss(self, num_told: int) -> None:
        """A server was lost, after so many tokens of its answer. Raises `RequestError` where that was one too many."""
        if num_told > self._num_told + UNPROVEN_TOKENS:
            self._num_lost = 0
        self._num_lost, self._num_told = self._num_lost + 1, num_told
        if self._num_lost >= MAX_LOST and not self._is_gone:
            self._figures.broken.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{self._num_lost} servers were lost one after the other while they had this request; it is not sent to another.",
            )

    def _nobody(self, tried: set[Server]) -> RequestError:
        states = "; ".join(f"{server.url}: {server.trouble or 'lost it'}" for server in self._servers)
        what = f"{len(tried)} servers were asked" if tried else "No server can take requests"
        return RequestError(
            ErrorCode.UNAVAILABLE, f"{what} ({states or 'none is listed'}); try again shortly.", retry_s=1
        )

    # --- after it ---------------------------------------------------------------------------------------------

    async def _pass_on(self, flow: Flow, outgoing: Outgoing, asked: Asked) -> bool:
        """Write a stream to its end. False where it was lost before anything of it was written."""
        exchange = self._exchange
        head = flow.connection
        content_type = header_of(head.headers, b"content-type")
        headers = passed_on(head.headers)
        self._ticket = header_of(head.headers, RELAY)
        while True:
            try:
                piece = await flow.take()
                is_cut_off = not piece and not (self._events.is_over or _says_its_end(flow))
            except ConnectionError:
                is_cut_off, piece = not self._events.is_over, b""
            if self._is_gone:
                raise ClientGone
            if is_cut_off and not exchange.started:
                return False
            if is_cut_off:
                flow = await self._go_on(outgoing, asked)
                continue
            if not piece:
                if not exchange.started:
                    await exchange.start_stream(content_type, headers)
                await exchange.write(b"", last=True)
                return True
            if self._held is not None:
                self._held.begin()
            told = self._events.take(piece)
            if not told:
                continue
            if not exchange.started:
                await exchange.start_stream(content_type, headers)
            is_last = self._events.is_over and flow.is_read
            await exchange.write(told, last=is_last)
            if is_last:
                return True

    async def _go_on(self, outgoing: Outgoing, asked: Asked) -> Flow:
        """Return the flow of what comes behind what the client has."""
        lost = self._held.server if self._held is not None else None
        self._let_go()
        found = self._events.begin_again()
        if found is not None and lost is not None:
            name, position, outputs = found
            until_s = time.monotonic() + self._patience.resume_s
            elsewhere = going_on(outgoing, self._ticket, position, outputs)
            held = None if lost.trouble else self._servers.hold(lost)
            request, avoided = the_rest(outgoing, name, position), {lost}
            while True:
                flow = None if held is None else await self._ask_to_go_on(held, request)
                if flow is not None:
                    self._figures.resumptions.inc()
                    self._ticket = header_of(flow.connection.headers, RELAY) or self._ticket
                    return flow
                if request is not elsewhere:
                    self._note_loss(sum(map(len, outputs)))
                if elsewhere is None or self._is_gone or time.monotonic() > until_s:
                    break
                request, held = elsewhere, self._servers.choose(asked, avoided)
                if held is not None:
                    avoided.add(held.server)
                else:  # everybody was asked: whoever comes, or comes back, is asked next
                    avoided.clear()
                    await asyncio.sleep(LOOK_S)
        if self._is_gone:
            raise ClientGone
        self._figures.broken.inc()
        raise RequestError(
            ErrorCode.UNAVAILABLE,
            "The server that answered was lost, and nobody can go on with its answer; ask again.",
        )

    async def _ask_to_go_on(self, held: Held, request: Outgoing) -> Flow | None:
        """Have a server go on. None where it does not."""
        try:
            flow = await self._send(held, request)
        except ConnectionError as error:
            if isinstance(error, Unreachable):
                held.server.note(str(error))
            self._let_go()
            return None
        if flow.is_stream:
            return flow
        _log.info(
            "%s does not go on with %s: status %d",
            held.server.url,
            request.request_id,
            flow.connection.status,
        )
        self._let_go()
        return None


def _says_its_end(flow: Flow) -> bool:
    """Whether a stream that was cut off cannot look as if it had ended."""
    headers = flow.connection.headers
    return bool(header_of(headers, b"transfer-encoding") or header_of(headers, b"content-length"))
