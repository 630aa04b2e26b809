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

from quintet.deploy.http_client.pool import ResponseFlow, Unreachable
from quintet.deploy.router.attempts import Attempt, HedgedAttempt, Hedging
from quintet.deploy.router.disaggregation import prefill_remotely
from quintet.deploy.router.events import Events
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import HeldPrefixes, Server, Servers
from quintet.deploy.router.upstream import (
    RELAY,
    Outgoing,
    forwarded_headers,
    header_of,
    rest_request,
    resume_request,
    retry_after_s,
)
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.streams import UNPROVEN_TOKENS
from quintet.wire.errors import ErrorCode, RequestError

RETRYABLE = frozenset({429, 502, 503})
"""Retryable status codes: another server may accept the request."""
NOT_IDEMPOTENT = "/v1/conversations"
"""Paths with non-idempotent requests: retried only if the server never received the request."""
HEDGED = {
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"),
    *("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
}
"""Paths that may be hedged, because servers store nothing. Responses are stored, so hedging would store two."""
STORED = ("/v1/responses/", "/v1/conversations/", "/v1/streams/")
"""Paths of objects stored on one server, which is found by asking the servers in turn."""
LAST_EVENT = b"last-event-id"
"""Header with which a client resumes a stream by repeating its request."""
POLL_S, MAX_PAUSE_S = 0.05, 5.0
"""Interval of a wait for a server; maximum backoff between two resume requests to one, unless its Retry-After is longer."""
MAX_REFUSALS = 3
"""Servers tried while all refuse with a retryable status; more tries would add load to full servers."""
MAX_LOST = 2
"""Servers that may be lost with a request that makes no progress: the request may be the cause."""
_log = logging.getLogger("quintet")


@dataclass(frozen=True, slots=True)
class ProxyTimeouts:
    first_s: float
    """Wait for a usable server while there is none."""
    resume_s: float
    """Wait for a server that resumes a stream."""
    hedging: Hedging = field(default_factory=Hedging)


class ProxiedRequest:
    """One request of a client, with all its attempts."""

    def __init__(
        self, servers: Servers, metrics: RouterMetrics, timeouts: ProxyTimeouts, http_request: HttpRequest
    ) -> None:
        self._servers = servers
        self._metrics = metrics
        self._timeouts = timeouts
        self._exchange = http_request
        self._events = Events(is_relayed=False)
        self._ticket = b""
        self._attempt: Attempt | None = None
        """Current attempt."""
        self._hedge: Attempt | None = None
        """Hedge or prefill attempt in addition to the current one."""
        self._is_disconnected = False
        self._tried: set[Server] = set()
        """Servers that were tried without an answer."""
        self._num_lost = 0
        """Servers lost with the request since its last progress."""
        self._num_sent = 0
        """Tokens sent to the client when the last server was lost."""
        self._resumed_at = ""
        """Stream cursor at the last resumption on the same server."""

    async def answer(self, outgoing: Outgoing, summary: RequestSummary) -> None:
        """Answer the client. Raises `RequestError` before anything was written, or `ClientDisconnected`."""
        watcher = self._exchange.watch_disconnect(self._cancel)
        try:
            flow = await self._begin(outgoing, summary)
            while flow.is_stream:
                if await self._forward(flow, outgoing, summary):
                    return
                self._release()
                self._note_loss(0)
                flow = await self._begin(outgoing, summary)
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
                forwarded_headers(flow.headers),
            )
        except (ConnectionError, asyncio.CancelledError):
            if self._is_disconnected:
                raise ClientDisconnected from None
            raise
        finally:
            watcher.cancel()
            self._release()

    def _cancel(self) -> None:
        """Cancel all attempts because the client has disconnected."""
        self._is_disconnected = True
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.cancel()

    # --- before the first byte --------------------------------------------------------------------------------

    async def _begin(self, outgoing: Outgoing, summary: RequestSummary) -> ResponseFlow:
        """Send the request, with retries; return the flow of an answer with a received head."""
        tried, refused = self._tried, list[ResponseFlow]()
        until_s = time.monotonic() + self._timeouts.first_s
        is_stored = _is_stored(outgoing)
        is_not_idempotent = outgoing.path.startswith(NOT_IDEMPOTENT) and outgoing.method != "GET"
        ready: Outgoing | None = None
        may_hedge = bool(self._timeouts.hedging.after_s and outgoing.path in HEDGED and not is_stored)
        while True:
            if self._is_disconnected:
                raise ClientDisconnected
            held = None if len(refused) == MAX_REFUSALS else self._servers.choose(summary, tried)
            if held is None:
                if refused:
                    return refused[-1]
                if tried or time.monotonic() > until_s:
                    raise self._no_server_error(tried)
                await asyncio.sleep(POLL_S)
                continue
            tried.add(held.server)
            if len(tried) > 1:
                self._metrics.retries.inc()
            elif may_hedge:
                self._timeouts.hedging.earn()
            held.num_before *= not is_stored  # a stored answer does not measure the server's speed
            if ready is None:
                ready = outgoing if is_stored else await self._prefilled(held, outgoing, summary)
            try:
                if may_hedge and not self._num_lost:  # do not hedge a request that may crash servers
                    flow, held = await self._send_hedged(held, ready, summary)
                else:
                    flow = await self._send(held, ready, is_not_idempotent)
            except Unreachable as error:
                held.server.set_trouble(str(error))
                self._release()
                continue
            except ConnectionError as error:
                self._release()
                if self._is_disconnected:
                    raise ClientDisconnected from None
                _log_loss(held.server, error, outgoing)
                self._note_loss(0)
                if is_not_idempotent:
                    raise RequestError(
                        ErrorCode.UNAVAILABLE,
                        "The server was lost while it answered; it may have executed the request.",
                    ) from None
                continue
            self._metrics.answered(held.server, status := flow.status)
            if is_stored and status == 404:
                refused[:] = [flow]
            elif status == 400 and ready is not outgoing:  # the server rejects the KV transfer
                ready = outgoing
                tried.discard(held.server)
            elif status in RETRYABLE:
                refused.append(flow)
            else:
                self._metrics.first_byte.observe((time.monotonic_ns() - self._exchange.arrival_ns) * 1e-9)
                return flow
            self._release()

    async def _prefilled(self, held: HeldPrefixes, outgoing: Outgoing, summary: RequestSummary) -> Outgoing:
        """Return the request for a server, after disaggregated prefill on another server if worthwhile."""
        self._attempt = Attempt(held)

        def enter(attempt: Attempt | None) -> None:
            self._hedge = attempt

        ready = await prefill_remotely(
            self._servers, self._metrics, outgoing, summary, held, enter, lambda: self._note_loss(0)
        )
        if self._is_disconnected:
            raise ClientDisconnected
        return ready

    async def _send(self, held: HeldPrefixes, outgoing: Outgoing, is_fresh: bool = False) -> ResponseFlow:
        """Send to a server and wait for the answer's head. Raises `ConnectionError`."""
        self._attempt = Attempt(held)
        return await self._attempt.send(outgoing, is_fresh)

    async def _send_hedged(
        self, held: HeldPrefixes, outgoing: Outgoing, summary: RequestSummary
    ) -> tuple[ResponseFlow, HeldPrefixes]:
        """Send with hedging to another server after the hedging delay; return the winner's flow and account."""
        hedging = self._timeouts.hedging
        self._attempt = Attempt(held)
        race = HedgedAttempt(self._attempt, outgoing, lambda flow: flow.status in RETRYABLE)
        try:
            if not await race.wait_started(hedging.after_s) and hedging.is_allowed():
                other = self._servers.choose(summary, self._tried)
                if other is not None:
                    hedging.spend()
                    self._metrics.hedges.inc()
                    self._tried.add(other.server)
                    self._hedge = Attempt(other)
            won, task = await race.run(self._hedge)
            self._attempt = won
        except asyncio.CancelledError:
            race.cancel()
            if self._hedge is not None:
                self._hedge.release()
            raise
        finally:
            self._hedge = None
        if not self._is_disconnected:  # a disconnect closes both connections
            for server, error in race.lost:
                _log_loss(server, error, outgoing)
            self._num_lost += len(race.lost)
        return task.result(), won.held

    def _release(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.release()

    def _note_loss(self, num_sent: int) -> None:
        """Count a lost server, after ``num_sent`` sent tokens. Raises `RequestError` at `MAX_LOST` without progress."""
        if num_sent > self._num_sent + UNPROVEN_TOKENS:
            self._num_lost = 0
        self._num_lost, self._num_sent = self._num_lost + 1, num_sent
        if self._num_lost >= MAX_LOST and not self._is_disconnected:
            self._metrics.broken.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{self._num_lost} servers were lost one after another while they had this request; it is not retried.",
            )

    def _no_server_error(self, tried: set[Server]) -> RequestError:
        states = "; ".join(f"{server.url}: {server.trouble or 'lost'}" for server in self._servers)
        cause = f"All {len(tried)} servers tried have failed" if tried else "No server is available"
        return RequestError(
            ErrorCode.UNAVAILABLE, f"{cause} ({states or 'none is listed'}); retry shortly.", retry_s=1
        )

    # --- after the first byte ---------------------------------------------------------------------------------

    async def _forward(self, flow: ResponseFlow, outgoing: Outgoing, summary: RequestSummary) -> bool:
        """Forward a stream to its end. Return False if it was lost before anything but comments was sent."""
        http_request = self._exchange
        content_type = header_of(flow.headers, b"content-type")
        headers = forwarded_headers(flow.headers)
        self._ticket = header_of(flow.headers, RELAY)
        events = self._events = Events(bool(self._ticket), http_request.reads_event_ids)
        while True:
            try:
                chunk = await flow.take()
                is_lost = not chunk and not (events.is_over or _has_framing(flow))
            except ConnectionError:
                is_lost, chunk = not events.is_over, b""
            if self._is_disconnected:
                raise ClientDisconnected
            forwarded = events.take(chunk) if chunk else b"" if is_lost else events.flush()
            if self._attempt is not None and events.has_started:
                self._attempt.held.answer()
            is_over = not (chunk or is_lost) or (events.is_over and flow.is_read)
            is_last = is_over and not events.is_withdrawn
            if forwarded or is_last:
                if not http_request.started:
                    await http_request.start_stream(content_type, headers)
                await http_request.write(forwarded, last=is_last)
                if is_last:
                    return True
            if is_lost or events.is_withdrawn:
                if not events.has_started:
                    return False
                flow = await self._resume(outgoing, summary)

    async def _resume(self, outgoing: Outgoing, summary: RequestSummary) -> ResponseFlow:
        """Resume a stream after the client's last event; return the new flow."""
        lost = self._attempt.held.server if self._attempt is not None else None
        is_withdrawn = self._events.is_withdrawn
        self._release()
        flow = None
        if lost is not None and (found := self._events.take_resume_state()) is not None:
            name, position, outputs = found
            # The cursor must have moved since the last resumption on this server, to avoid an endless loop.
            if not lost.trouble and not is_withdrawn and position != self._resumed_at:
                self._resumed_at = position
                flow = await self._resume_on_same(lost, rest_request(outgoing, name, position))
            if flow is None and outputs is not None:
                num_sent = sum(map(len, outputs))
                self._note_loss(num_sent)
                if (request := resume_request(outgoing, self._ticket, position, outputs)) is not None:
                    flow = await self._resume_on_another(request, summary, lost, num_sent)
        if self._is_disconnected:
            raise ClientDisconnected
        if flow is None:
            self._metrics.broken.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                "The server that answered was lost, and no server can resume the stream; retry.",
            )
        self._metrics.resumptions.inc()
        self._ticket = header_of(flow.headers, RELAY) or self._ticket
        return flow

    async def _resume_on_same(self, server: Server, request: Outgoing) -> ResponseFlow | None:
        """Resume a stream on the same server. None if the server is lost or has dropped the stream."""
        try:
            flow = await self._send(self._servers.hold(server), request)
        except ConnectionError as error:
            if isinstance(error, Unreachable):
                server.set_trouble(str(error))
            self._release()
            return None
        if not flow.is_stream:
            self._release()
            return None
        return flow

    async def _resume_on_another(
        self, request: Outgoing, summary: RequestSummary, lost: Server, num_sent: int
    ) -> ResponseFlow | None:
        """Resume on another server, or on the lost one after its recovery. None after the timeout.

        Raises `RequestError` if too many servers were lost with the request.
        """
        until_s = time.monotonic() + self._timeouts.resume_s
        later = {lost: time.monotonic() + POLL_S}
        """Time of the next try, by server."""
        pauses: dict[Server, float] = {}
        while not self._is_disconnected and (now_s := time.monotonic()) < until_s:
            held = self._servers.choose(summary, {server for server, at_s in later.items() if at_s > now_s})
            if held is None:
                await asyncio.sleep(POLL_S)
                continue
            held.num_before = 0  # a resumed answer does not measure the server's speed
            server = held.server
            pauses[server] = pause_s = min(2 * pauses.get(server, POLL_S), MAX_PAUSE_S)
            try:
                flow = await self._send(held, request)
            except Unreachable as error:
                server.set_trouble(str(error))
            except ConnectionError as error:
                self._release()
                if not self._is_disconnected:
                    _log.info("%s: %s while resuming request %s", server.url, error, request.request_id)
                    self._note_loss(num_sent)
            else:
                if flow.is_stream:
                    return flow
                _log.info(
                    "%s: refused to resume request %s: status %d", server.url, request.request_id, flow.status
                )
                retry_s = retry_after_s(flow.headers)
                pause_s = max(pause_s, retry_s) if flow.status in RETRYABLE else self._timeouts.resume_s
            self._release()
            later[server] = time.monotonic() + pause_s * random.uniform(1.0, 1.5)
        return None


def _is_stored(outgoing: Outgoing) -> bool:
    """Return whether only the server that stores the object or stream can answer the request."""
    return outgoing.path.startswith(STORED) or any(name == LAST_EVENT for name, _ in outgoing.headers)


def _log_loss(server: Server, error: Exception, outgoing: Outgoing) -> None:
    _log.info("%s: %s while it had request %s", server.url, error, outgoing.request_id)


def _has_framing(flow: ResponseFlow) -> bool:
    """Return whether the answer has framing that distinguishes its end from a lost connection."""
    headers = flow.headers
    return bool(header_of(headers, b"transfer-encoding") or header_of(headers, b"content-length"))
