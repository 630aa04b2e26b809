"""Frontend process: HTTP server on an inherited socket, connected to the other processes.

python -m quintet.frontend.main --run-dir … --index … --epoch … --parent …
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
import uvloop

from quintet.frontend.app import FrontendApp
from quintet.frontend.http.server import inherited_listener, make_server
from quintet.frontend.inbox_handlers import REPORT_INTERVAL_S, FrontendInbox
from quintet.frontend.service import Service
from quintet.process.child import child_main
from quintet.process.runtime import HandlerError, Process, Stopping
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import SlotState, Topology

GRACE_S = 2.0
"""Seconds between closing the listener and closing idle connections: a request may already be on its way on one."""
POLL_S = 0.1
LAG_INTERVAL_S = 1.0
TOPOLOGY_TIMEOUT_S = 1.0
"""Maximum wait for the supervisor's acknowledgement before the first accept; connections queue in the socket until then."""


class Frontend:
    """The frontend process: HTTP connections and process messages share one event loop."""

    def __init__(self, me: WorkerId, config: EngineConfig) -> None:
        self._process: Process[msgspec.Struct] = Process(me, config, FrontendInbox)
        self._service = Service(
            me, self._process.peers.send, config, self._process.metrics, self._process.span
        )
        self._server = make_server(FrontendApp(self._service), config.frontend)
        self._lag = self._process.metrics.histogram(
            "event_loop_lag_seconds", "Delay between the due time of an event loop timer and its call."
        )
        self._me = me
        self._is_acknowledged = asyncio.Event()
        self._crash: HandlerError | None = None
        self._retirement: asyncio.Task[None] | None = None

    def _handle(self, message: msgspec.Struct) -> None:
        self._service.handle(message)
        if isinstance(message, Topology) and any(
            slot.worker == self._me and slot.state is SlotState.READY for slot in message.slots
        ):
            self._is_acknowledged.set()
        if self._service.is_retiring and self._retirement is None:
            self._retirement = asyncio.get_running_loop().create_task(self._retire())
        self._process.progress = self._service.requests.ledger.num_received

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Stop on `Stopping`, crash on `HandlerError`, and log an error of a connection or timer."""
        error = context.get("exception")
        if isinstance(error, Stopping):
            self._stop()
        elif isinstance(error, HandlerError):
            self._crash = error
            self._stop()
        else:
            loop.default_exception_handler(context)

    def _stop(self) -> None:
        self._is_acknowledged.set()
        self._service.admission.draining = True
        self._service.requests.fail_all(RequestError(ErrorCode.UNAVAILABLE, "The server is shutting down."))
        self._service.write_timeout.end_all()
        self._server.should_exit = True
        self._server.force_exit = True

    async def _retire(self) -> None:
        """Retire: close the listener, answer requests on open connections, then close each connection."""
        self._is_acknowledged.set()
        while not self._server.started:
            await asyncio.sleep(POLL_S)
        for accepting in self._server.servers:
            accepting.close()
        await asyncio.sleep(GRACE_S)
        connections = self._server.server_state.connections
        while connections:
            for connection in list(connections):
                connection.shutdown()  # closes at once if idle, else after the response
            await asyncio.sleep(POLL_S)
        self._service.is_cut_off = True
        self._service.check_drained()

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._lag.observe(max(0.0, now_s - due_s))
        loop.call_at(now_s + LAG_INTERVAL_S, self._measure_lag, loop, now_s + LAG_INTERVAL_S)

    def _report_in_flight(self, loop: asyncio.AbstractEventLoop) -> None:
        self._service.inbox.send_reports()
        loop.call_later(REPORT_INTERVAL_S, self._report_in_flight, loop)

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the supervisor stops the process.

        Accepts the first connection after the topology is known. Else a frontend that starts late, or replaces another,
        would answer 503 for lack of a core.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._process.attach(loop, self._handle)
        self._measure_lag(loop, loop.time())
        loop.call_later(REPORT_INTERVAL_S, self._report_in_flight, loop)
        bound = listener.getsockname()
        listening = bound if isinstance(bound, str) else f"{bound[0]} port {bound[1]}"
        self._process.ready(listening=listening)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_acknowledged.wait(), TOPOLOGY_TIMEOUT_S)
        await self._server.serve(sockets=[listener])
        if self._crash is not None:
            raise self._crash

    def close(self) -> None:
        self._process.close()


def run(me: WorkerId, config: EngineConfig) -> None:
    frontend = Frontend(me, config)
    try:
        uvloop.run(frontend.serve(inherited_listener()))
    finally:
        frontend.close()


if __name__ == "__main__":
    child_main(Role.FRONTEND, run)
