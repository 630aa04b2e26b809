"""Frontend process: HTTP server on an inherited socket, connected to the other processes.

python -m quintet.frontend.main --run-dir … --index … --epoch … --parent …
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec
import uvicorn
import uvloop
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.app import FrontendApp
from quintet.frontend.http.auth import with_cors
from quintet.frontend.http.connection import IDLE_S, Protocol, bound_send_buffer
from quintet.frontend.inbox_handlers import REPORT_INTERVAL_S, FrontendInbox
from quintet.frontend.service import Service
from quintet.process.runtime import HandlerError, Process, Stopping, child_main
from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import SlotState, Topology

LISTEN_FD = "QUINTET_LISTEN_FD"
"""Environment variable with the number of the listening socket's descriptor, made by the supervisor."""

GRACE_S = 2.0
"""Seconds between closing the listener and closing idle connections: a request may already be on its way on one."""
POLL_S = 0.1
LAG_INTERVAL_S = 1.0
TOPOLOGY_TIMEOUT_S = 1.0
"""Maximum wait for the supervisor's acknowledgement before the first accept; connections queue in the socket until then."""


def wrap_middleware(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """Wrap the application in ASGI middleware given by dotted name; the last name is the outermost, as in vLLM.

    A class takes the application. A coroutine function takes the request and `call_next`. Raises `ConfigError`.
    """
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--middleware {name!r} cannot be imported: {error}") from None
        if inspect.isclass(found):
            app = cast(Callable[[ASGIApp], ASGIApp], found)(app)
        elif inspect.iscoroutinefunction(found):
            app = BaseHTTPMiddleware(app, dispatch=found)
        else:
            raise ConfigError(f"--middleware {name!r} must be a class or a coroutine function")
    return app


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers: the supervisor decides when a child exits."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handler."""
        yield


def make_server(app: ASGIApp, config: FrontendConfig) -> HttpServer:
    """Build the HTTP server; run it with ``serve(sockets=[…])``."""
    protocol = functools.partial(
        Protocol,
        write_timeout_s=config.write_timeout_s,
        header_timeout_s=config.header_timeout_s,
        errors=ERRORS,
    )
    return HttpServer(
        uvicorn.Config(
            wrap_middleware(with_cors(app, config), config.middleware),
            loop="none",
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
            ssl_ca_certs=config.ssl_ca_certs or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
        )
    )


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
        if isinstance(message, Topology) and _shows_ready(message, self._me):
            self._is_acknowledged.set()
        if self._service.is_retiring and self._retirement is None:
            self._retirement = asyncio.get_running_loop().create_task(self._retire())
        self._process.progress = self._service.sessions.ledger.num_received

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
        self._service.sessions.fail_all(RequestError(ErrorCode.UNAVAILABLE, "The server is shutting down."))
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
        """Close every socket."""
        self._process.close()


def _shows_ready(topology: Topology, worker: WorkerId) -> bool:
    return any(slot.worker == worker and slot.state is SlotState.READY for slot in topology.slots)


def inherited_listener() -> socket.socket:
    """Return the listening socket inherited from the supervisor."""
    number = os.environ.get(LISTEN_FD, "")
    if not number.isdigit():
        raise ConfigError(
            f"{LISTEN_FD} is {number!r}; it must be the file descriptor of a listening socket. "
            "Start the server with `quintet serve`."
        )
    listener = socket.socket(fileno=int(number))
    listener.setblocking(False)
    bound_send_buffer(listener)
    return listener


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each connection takes one descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(me: WorkerId, config: EngineConfig) -> None:
    """Run the frontend until the supervisor stops it."""
    raise_file_limit()
    frontend = Frontend(me, config)
    try:
        uvloop.run(frontend.serve(inherited_listener()))
    finally:
        frontend.close()


if __name__ == "__main__":
    child_main(Role.FRONTEND, run)
