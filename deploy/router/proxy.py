"""One request on its way through: a server is chosen, its answer passed on, and where the server is lost another goes on.

chosen ──▶ sent ──▶ begun ──▶ passed on ──▶ over
   ▲         │ lost, or it cannot now  │ lost
   └─────────┘                         └──▶ gone on with: at the same server if it lives, else at another, if the
                                            server told how (`events.py`); or ended with an error
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field

from quintet.deploy.router.attempts import Attempt, HedgedAttempt, Hedging
from quintet.deploy.router.connection_pool import ResponseFlow, Unreachable
from quintet.deploy.router.disaggregation import computed_apart
from quintet.deploy.router.events import Events
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import HeldPrefixes, Server, Servers
from quintet.deploy.router.upstream import (
    RELAY,
    Outgoing,
    going_on,
    header_of,
    passed_on,
    retry_after_s,
    the_rest,
)
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.streams import UNPROVEN_TOKENS
from quintet.wire.errors import ErrorCode, RequestError

ELSEWHERE = frozenset({429, 502, 503})
"""A server that answers so cannot now; another may."""
ONCE = "/v1/conversations"
"""What is done here twice is two things: it is sent again only where it was never received."""
HEDGED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"})
"""What may be done twice at once: only the answer is left of it. A response is kept by its server, twice is two."""
KEPT = ("/v1/responses/", "/v1/conversations/", "/v1/streams/")
"""What only the server knows that has it: whoever does is found by asking."""
LAST_EVENT = b"last-event-id"
"""With it a client comes back for a stream by sending its request again."""
LOOK_S = 0.05
MAX_PAUSE_S = 5.0
"""Between two times that one server is asked to go on with a stream, unless it names a longer one."""
MAX_REFUSALS = 3
"""So many servers are asked while all answer that they cannot now: where all are full, asking makes it worse."""
MAX_LOST = 2
"""So many servers may be lost with a request that comes no further: it may be what they are lost of."""
_log = logging.getLogger("quintet")


@dataclass(frozen=True, slots=True)
class ProxyTimeouts:
    """How long the router waits."""

    first_s: float
    """For a server, while there is none."""
    resume_s: float
    """For a server to go on with a stream."""
    hedging: Hedging = field(default_factory=Hedging)


class ProxiedRequest:
    """One exchange."""

    def __init__(
        self, servers: Servers, figures: RouterMetrics, patience: ProxyTimeouts, exchange: HttpRequest
    ) -> None:
        self._servers = servers
        self._figures = figures
        self._patience = patience
        self._exchange = exchange
        self._events = Events(is_relayed=False)
        self._ticket = b""
        self._sending: Attempt | None = None
        """Where the request is."""
        self._copy: Attempt | None = None
        """Where it is as well, until one of the two begins."""
        self._is_gone = False
        self._tried: set[Server] = set()
        """Where the request was sent, and did not begin."""
        self._num_lost = 0
        """Servers that were lost with it since it last came further."""
        self._num_told = 0
        """Tokens that had been told when the last was lost."""
        self._back_from = ""
        """Where the client was when the server that had its stream was asked for the rest."""

    async def answer(self, outgoing: Outgoing, asked: RequestSummary) -> None:
        """Answer the client. Raises `RequestError` before anything was written, or `ClientDisconnected`."""
        watcher = self._exchange.watch_disconnect(self._leave)
        try:
            flow = await self._begin(outgoing, asked)
            while flow.is_stream:
                if await self._pass_on(flow, outgoing, asked):
                    return
                self._let_go()
                self._note_loss(0)
                flow = await self._begin(outgoing, asked)
            whole = await flow.whole
            if self._exchange.started:  # of an answer of which only comments were told
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"The server that had the request was lost, and another answered with status {whole.status}; ask again.",
                )
            await self._exchange.respond(
                whole.status,
                whole.body,
                header_of(flow.headers, b"content-type") or b"application/json",
                passed_on(flow.headers),
            )
        except (ConnectionError, asyncio.CancelledError):
            if self._is_gone:
                raise ClientDisconnected from None
            raise
        finally:
            watcher.cancel()
            self._let_go()

    def _leave(self) -> None:
        """The client is gone: so is whoever computes for it."""
        self._is_gone = True
        for sending in (self._sending, self._copy):
            if sending is not None:
                sending.leave()

    # --- before the first byte --------------------------------------------------------------------------------

    async def _begin(self, outgoing: Outgoing, asked: RequestSummary) -> ResponseFlow:
        """Return the flow of an answer of which the head has come, or all of it."""
        tried, refused = self._tried, list[ResponseFlow]()
        until_s = time.monotonic() + self._patience.first_s
        is_kept = outgoing.path.startswith(KEPT) or any(name == LAST_EVENT for name, _ in outgoing.headers)
        is_once = outgoing.path.startswith(ONCE) and outgoing.method != "GET"
        ready: Outgoing | None = None
        may_copy = bool(self._patience.hedging.after_s and outgoing.path in HEDGED and not is_kept)
        while True:
            if self._is_gone:
                raise ClientDisconnected
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
            elif may_copy:
                self._patience.hedging.earn()
            held.num_before *= not is_kept  # what is there already says nothing of how fast it was computed
            if ready is None:
                ready = outgoing if is_kept else await self._ready_for(held, outgoing, asked)
            try:
                if may_copy and not self._num_lost:  # two at once might be two that are lost of it
                    flow, held = await self._send_twice(held, ready, asked)
                else:
                    flow = await self._send(held, ready, is_once)
            except Unreachable as error:
                held.server.note(str(error))
                self._let_go()
                continue
            except ConnectionError as error:
                self._let_go()
                if self._is_gone:
                    raise ClientDisconnected from None
                _tell_loss(held.server, error, outgoing)
                self._note_loss(0)
                if is_once:
                    raise RequestError(
                        ErrorCode.UNAVAILABLE,
                        "The server was lost while it answered; it may have done what was asked.",
                    ) from None
                continue
            self._figures.answered(held.server, status := flow.status)
            if is_kept and status == 404:
                refused[:] = [flow]
            elif status == 400 and ready is not outgoing:  # what another computed is not wanted there
                ready = outgoing
                tried.discard(held.server)
            elif status in ELSEWHERE:
                refused.append(flow)
            else:
                self._figures.first_byte.observe((time.monotonic_ns() - self._exchange.arrival_ns) * 1e-9)
                return flow
            self._let_go()

    async def _ready_for(self, held: HeldPrefixes, outgoing: Outgoing, asked: RequestSummary) -> Outgoing:
        """Return what a server is sent for a request, its prompt computed by another where that is worth it."""
        self._sending = Attempt(held)

        def enter(sending: Attempt | None) -> None:
            self._copy = sending

        ready = await computed_apart(
            self._servers, self._figures, outgoing, asked, held, enter, lambda: self._note_loss(0)
        )
        if self._is_gone:
            raise ClientDisconnected
        return ready

    async def _send(self, held: HeldPrefixes, outgoing: Outgoing, is_fresh: bool = False) -> ResponseFlow:
        """Send to a server and wait for the head of its answer. Raises `ConnectionError`."""
        self._sending = Attempt(held)
        return await self._sending.send(outgoing, is_fresh)

    async def _send_twice(
        self, held: HeldPrefixes, outgoing: Outgoing, asked: RequestSummary
    ) -> tuple[ResponseFlow, HeldPrefixes]:
        """The same, with a copy to another server if nothing comes for a while; return who it is at, too."""
        hedging = self._patience.hedging
        self._sending = Attempt(held)
        race = HedgedAttempt(self._sending, outgoing, lambda flow: flow.status in ELSEWHERE)
        try:
            if not await race.has_begun(hedging.after_s) and hedging.may():
                other = self._servers.choose(asked, self._tried)
                if other is not None:
                    hedging.spend()
                    self._figures.hedges.inc()
                    self._tried.add(other.server)
                    self._copy = Attempt(other)
            won, task = await race.run(self._copy)
            self._sending = won
        except asyncio.CancelledError:
            race.call_off()
            if self._copy is not None:
                self._copy.let_go()
            raise
        finally:
            self._copy = None
        if not self._is_gone:  # who leaves ends both connections
            for server, error in race.lost:
                _tell_loss(server, error, outgoing)
            self._num_lost += len(race.lost)
        return task.result(), won.held

    def _let_go(self) -> None:
        """Leave the server that has the request."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.let_go()

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

    async def _pass_on(self, flow: ResponseFlow, outgoing: Outgoing, asked: RequestSummary) -> bool:
        """Write a stream to its end. False where it was lost before anything but comments was written."""
        exchange = self._exchange
        content_type = header_of(flow.headers, b"content-type")
        headers = passed_on(flow.headers)
        self._ticket = header_of(flow.headers, RELAY)
        events = self._events = Events(is_relayed=bool(self._ticket))
        while True:
            try:
                piece = await flow.take()
                is_lost = not piece and not (events.is_over or _says_its_end(flow))
            except ConnectionError:
                is_lost, piece = not events.is_over, b""
            if self._is_gone:
                raise ClientDisconnected
            told = events.take(piece) if piece else b"" if is_lost else events.flush()
            if self._sending is not None and events.has_begun:
                self._sending.held.answer()
            is_over = not (piece or is_lost) or (events.is_over and flow.is_read)
            is_last = is_over and not events.is_withdrawn
            if told or is_last:
                if not exchange.started:
                    await exchange.start_stream(content_type, headers)
                await exchange.write(told, last=is_last)
                if is_last:
                    return True
            if is_lost or events.is_withdrawn:
                if not events.has_begun:
                    return False
                flow = await self._go_on(outgoing, asked)

    async def _go_on(self, outgoing: Outgoing, asked: RequestSummary) -> ResponseFlow:
        """Return the flow of what comes behind what the client has."""
        lost = self._sending.held.server if self._sending is not None else None
        is_withdrawn = self._events.is_withdrawn
        self._let_go()
        flow = None
        if lost is not None and (found := self._events.begin_again()) is not None:
            name, position, outputs = found
            # One that hangs up again before anything came would be asked for ever.
            if not lost.trouble and not is_withdrawn and position != self._back_from:
                self._back_from = position
                flow = await self._back_at(lost, the_rest(outgoing, name, position))
            if flow is None and outputs is not None:
                num_told = sum(map(len, outputs))
                self._note_loss(num_told)
                if (request := going_on(outgoing, self._ticket, position, outputs)) is not None:
                    flow = await self._elsewhere(request, asked, lost, num_told)
        if self._is_gone:
            raise ClientDisconnected
        if flow is None:
            self._figures.broken.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                "The server that answered was lost, and nobody can go on with its answer; ask again.",
            )
        self._figures.resumptions.inc()
        self._ticket = header_of(flow.headers, RELAY) or self._ticket
        return flow

    async def _back_at(self, server: Server, request: Outgoing) -> ResponseFlow | None:
        """Ask the server that had a stream for the rest of it. None where it is lost, or does not have it any more."""
        try:
            flow = await self._send(self._servers.hold(server), request)
        except ConnectionError as error:
            if isinstance(error, Unreachable):
                server.note(str(error))
            self._let_go()
            return None
        if not flow.is_stream:
            self._let_go()
            return None
        return flow

    async def _elsewhere(
        self, request: Outgoing, asked: RequestSummary, lost: Server, num_told: int
    ) -> ResponseFlow | None:
        """Have another server go on, or the lost one when it is back. None where nobody did in time.

        Raises `RequestError` where one server too many was lost with it.
        """
        until_s = time.monotonic() + self._patience.resume_s
        later = {lost: time.monotonic() + LOOK_S}
        """When each is asked again."""
        pauses: dict[Server, float] = {}
        while not self._is_gone and (now_s := time.monotonic()) < until_s:
            held = self._servers.choose(asked, {server for server, at_s in later.items() if at_s > now_s})
            if held is None:
                await asyncio.sleep(LOOK_S)
                continue
            held.num_before = 0  # its answer has begun long ago
            server = held.server
            pauses[server] = pause_s = min(2 * pauses.get(server, LOOK_S), MAX_PAUSE_S)
            try:
                flow = await self._send(held, request)
            except Unreachable as error:
                server.note(str(error))
            except ConnectionError as error:
                self._let_go()
                if not self._is_gone:
                    _log.info("%s: %s; it was to go on with %s", server.url, error, request.request_id)
                    self._note_loss(num_told)
            else:
                if flow.is_stream:
                    return flow
                _log.info("%s does not go on with %s: status %d", server.url, request.request_id, flow.status)
                asks_s = retry_after_s(flow.headers)
                pause_s = max(pause_s, asks_s) if flow.status in ELSEWHERE else self._patience.resume_s
            self._let_go()
            later[server] = time.monotonic() + pause_s * random.uniform(1.0, 1.5)
        return None


def _tell_loss(server: Server, error: Exception, outgoing: Outgoing) -> None:
    _log.info("%s: %s; it had request %s", server.url, error, outgoing.request_id)


def _says_its_end(flow: ResponseFlow) -> bool:
    """Whether a stream that was cut off cannot look as if it had ended."""
    headers = flow.headers
    return bool(header_of(headers, b"transfer-encoding") or header_of(headers, b"content-length"))
