"""Proxying of one request: choose a server, forward the answer, retry, and resume a stream after a server is lost.

choose ──▶ send ──▶ first byte ──▶ forward ──▶ end
   ▲         │ lost or refused        │ lost
   └─────────┘                        └──▶ resume on the same server if it is alive, otherwise on another one with the
                                           state from the events (`events.py`); or end with an error
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
"""Retryable status codes: another server may accept the request."""
ONCE = "/v1/conversations"
"""Paths with non-idempotent requests: retried only if the server never received the request."""
HEDGED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"})
"""Paths that may be hedged, because servers store nothing. Responses are stored, so hedging would store two."""
KEPT = ("/v1/responses/", "/v1/conversations/", "/v1/streams/")
"""Paths of objects stored on one server, which is found by asking the servers in turn."""
LAST_EVENT = b"last-event-id"
"""Header with which a client resumes a stream by repeating its request."""
LOOK_S = 0.05
MAX_PAUSE_S = 5.0
"""Maximum backoff between two resume requests to one server, unless its Retry-After is longer."""
MAX_REFUSALS = 3
"""Servers tried while all refuse with a retryable status; more tries would add load to full servers."""
MAX_LOST = 2
"""Servers that may be lost with a request that makes no progress: the request may be the cause."""
_log = logging.getLogger("quintet")


@dataclass(frozen=True, slots=True)
class ProxyTimeouts:
    """Timeouts of the router, and hedging."""

    first_s: float
    """Wait for a usable server while there is none."""
    resume_s: float
    """Wait for a server that resumes a stream."""
    hedging: Hedging = field(default_factory=Hedging)


class ProxiedRequest:
    """One request of a client, with all its attempts."""

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
        """Current attempt."""
        self._copy: Attempt | None = None
        """Hedge or prefill attempt in addition to the current one."""
        self._is_gone = False
        self._tried: set[Server] = set()
        """Servers that were tried without an answer."""
        self._num_lost = 0
        """Servers lost with the request since its last progress."""
        self._num_told = 0
        """Tokens sent to the client when the last server was lost."""
        self._back_from = ""
        """Stream cursor at the last resumption on the same server."""

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
            if self._exchange.started:  # only comments of a stream were sent
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"The server of the request was lost, and another one answered with status {whole.status}; retry.",
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
        """Cancel all attempts because the client has disconnected."""
        self._is_gone = True
        for sending in (self._sending, self._copy):
            if sending is not None:
                sending.leave()

    # --- before the first byte --------------------------------------------------------------------------------

    async def _begin(self, outgoing: Outgoing, asked: RequestSummary) -> ResponseFlow:
        """Send the request, with retries; return the flow of an answer with a received head."""
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
            held.num_before *= not is_kept  # a stored answer does not measure the server's speed
            if ready is None:
                ready = outgoing if is_kept else await self._ready_for(held, outgoing, asked)
            try:
                if may_copy and not self._num_lost:  # do not hedge a request that may crash servers
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
                        "The server was lost while it answered; it may have executed the request.",
                    ) from None
                continue
            self._figures.answered(held.server, status := flow.status)
            if is_kept and status == 404:
                refused[:] = [flow]
            elif status == 400 and ready is not outgoing:  # the server rejects the KV transfer
                ready = outgoing
                tried.discard(held.server)
            elif status in ELSEWHERE:
                refused.append(flow)
            else:
                self._figures.first_byte.observe((time.monotonic_ns() - self._exchange.arrival_ns) * 1e-9)
                return flow
            self._let_go()

    async def _ready_for(self, held: HeldPrefixes, outgoing: Outgoing, asked: RequestSummary) -> Outgoing:
        """Return the request for a server, after disaggregated prefill on another server if worthwhile."""
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
        """Send to a server and wait for the answer's head. Raises `ConnectionError`."""
        self._sending = Attempt(held)
        return await self._sending.send(outgoing, is_fresh)

    async def _send_twice(
        self, held: HeldPrefixes, outgoing: Outgoing, asked: RequestSummary
    ) -> tuple[ResponseFlow, HeldPrefixes]:
        """Send with hedging to another server after the hedging delay; return the winner's flow and account."""
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
        if not self._is_gone:  # a disconnect closes both connections
            for server, error in race.lost:
                _tell_loss(server, error, outgoing)
            self._num_lost += len(race.lost)
        return task.result(), won.held

    def _let_go(self) -> None:
        """Release the current attempt."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.let_go()

    def _note_loss(self, num_told: int) -> None:
        """Count a lost server, after ``num_told`` sent tokens. Raises `RequestError` at `MAX_LOST` without progress."""
        if num_told > self._num_told + UNPROVEN_TOKENS:
            self._num_lost = 0
        self._num_lost, self._num_told = self._num_lost + 1, num_told
        if self._num_lost >= MAX_LOST and not self._is_gone:
            self._figures.broken.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{self._num_lost} servers in succession were lost while they had this request; it is not retried.",
            )

    def _nobody(self, tried: set[Server]) -> RequestError:
        states = "; ".join(f"{server.url}: {server.trouble or 'lost'}" for server in self._servers)
        cause = f"All {len(tried)} servers tried have failed" if tried else "No server is available"
        return RequestError(
            ErrorCode.UNAVAILABLE, f"{cause} ({states or 'none is listed'}); retry shortly.", retry_s=1
        )

    # --- after the first byte ---------------------------------------------------------------------------------

    async def _pass_on(self, flow: ResponseFlow, outgoing: Outgoing, asked: RequestSummary) -> bool:
        """Forward a stream to its end. Return False if it was lost before anything but comments was sent."""
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
        """Resume a stream after the client's last event; return the new flow."""
        lost = self._sending.held.server if self._sending is not None else None
        is_withdrawn = self._events.is_withdrawn
        self._let_go()
        flow = None
        if lost is not None and (found := self._events.begin_again()) is not None:
            name, position, outputs = found
            # The cursor must have moved since the last resumption on this server, to avoid an endless loop.
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
                "The server that answered was lost, and no server can resume the stream; retry.",
            )
        self._figures.resumptions.inc()
        self._ticket = header_of(flow.headers, RELAY) or self._ticket
        return flow

    async def _back_at(self, server: Server, request: Outgoing) -> ResponseFlow | None:
        """Resume a stream on the same server. None if the server is lost or has dropped the stream."""
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
        """Resume on another server, or on the lost one after its recovery. None after the timeout.

        Raises `RequestError` if too many servers were lost with the request.
        """
        until_s = time.monotonic() + self._patience.resume_s
        later = {lost: time.monotonic() + LOOK_S}
        """Time of the next try, by server."""
        pauses: dict[Server, float] = {}
        while not self._is_gone and (now_s := time.monotonic()) < until_s:
            held = self._servers.choose(asked, {server for server, at_s in later.items() if at_s > now_s})
            if held is None:
                await asyncio.sleep(LOOK_S)
                continue
            held.num_before = 0  # a resumed answer does not measure the server's speed
            server = held.server
            pauses[server] = pause_s = min(2 * pauses.get(server, LOOK_S), MAX_PAUSE_S)
            try:
                flow = await self._send(held, request)
            except Unreachable as error:
                server.note(str(error))
            except ConnectionError as error:
                self._let_go()
                if not self._is_gone:
                    _log.info("%s: %s while resuming request %s", server.url, error, request.request_id)
                    self._note_loss(num_told)
            else:
                if flow.is_stream:
                    return flow
                _log.info(
                    "%s: refused to resume request %s: status %d", server.url, request.request_id, flow.status
                )
                asks_s = retry_after_s(flow.headers)
                pause_s = max(pause_s, asks_s) if flow.status in ELSEWHERE else self._patience.resume_s
            self._let_go()
            later[server] = time.monotonic() + pause_s * random.uniform(1.0, 1.5)
        return None


def _tell_loss(server: Server, error: Exception, outgoing: Outgoing) -> None:
    _log.info("%s: %s while it had request %s", server.url, error, outgoing.request_id)


def _says_its_end(flow: ResponseFlow) -> bool:
    """Return whether the answer has framing that distinguishes its end from a lost connection."""
    headers = flow.headers
    return bool(header_of(headers, b"transfer-encoding") or header_of(headers, b"content-length"))
