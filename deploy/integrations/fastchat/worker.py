"""``python -m quintet.deploy.integrations.fastchat.worker``: FastChat worker for a Quintet server.

    quintet serve MODEL --port 8000
    python -m quintet.deploy.integrations.fastchat.worker --server http://127.0.0.1:8000 \\
        --controller-address http://controller:21001 --worker-address http://this-machine:21002 --host 0.0.0.0

The worker registers at the controller while the server is ready, and withdraws while it drains or is unavailable.
FastChat's protocol has no authentication: every client that can reach the worker's port can use the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time

import setproctitle
import uvloop

from quintet.deploy.http_client.connection import BadUrl, Target
from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.integrations.fastchat.app import FastChatApp
from quintet.deploy.integrations.fastchat.registration import Registration
from quintet.deploy.supervisor.listener import PortInUse, bind_listener
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.server import make_server, prepare_listener
from quintet.process.log import configure_logging
from quintet.wire.config import FrontendConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError

MAX_BODY_BYTES = 32 << 20
LOOK_S = 0.1
CONNECT_S = 2.0
MAX_HEARTBEAT_S = 60.0
"""The controller forgets a worker after 90 s of silence."""
_log = logging.getLogger("quintet")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Flag names are those of FastChat's workers where they exist."""
    parser = argparse.ArgumentParser(
        prog="python -m quintet.deploy.integrations.fastchat.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="Quintet server (default: %(default)s)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server, if it requires one")
    parser.add_argument(
        "--controller-address",
        default="http://localhost:21001",
        metavar="URL",
        help="FastChat controller (default: %(default)s)",
    )
    parser.add_argument(
        "--worker-address",
        metavar="URL",
        help="address of this worker for FastChat (default: http://localhost:PORT)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=21002,
        help="port to listen on; 0 selects a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--heartbeat", type=float, default=45.0, metavar="S",
        help="heartbeat interval; the controller forgets a worker after 90 s (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="time that open requests may take to finish after SIGTERM (default: %(default)g)",
    )
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args(words)


def _peer(flag: str, url: str, api_key: str | None = None) -> ConnectionPool:
    try:
        return ConnectionPool(Target.parse(url, api_key), CONNECT_S)
    except BadUrl as error:
        raise ConfigError(f"{flag}: {error}") from None


async def serve(
    server: ConnectionPool, controller: ConnectionPool, listener: socket.socket, arguments: argparse.Namespace
) -> None:
    """Serve until SIGTERM or SIGINT."""
    host, port = listener.getsockname()[:2]
    address = (arguments.worker_address or f"http://localhost:{port}").rstrip("/")
    registration = Registration(controller, server, address, arguments.heartbeat)
    http = make_server(FastChatApp(server, registration, BodyBuffers(MAX_BODY_BYTES)), FrontendConfig())
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = loop.create_task(http.serve(sockets=[listener]))
    registering = loop.create_task(registration.run())
    stopping = loop.create_task(stop.wait())
    _log.info("listening on %s port %d, as %s", host, port, address)
    await asyncio.wait([serving, registering, stopping], return_when=asyncio.FIRST_COMPLETED)
    if registering.done():
        registering.result()  # raises: it ends only by an internal error
    registering.cancel()
    await registration.withdraw()
    until_s = time.monotonic() + arguments.drain_timeout
    while registration.num_open and time.monotonic() < until_s:
        await asyncio.sleep(LOOK_S)
    http.should_exit = True
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for peer in (server, controller):
        peer.close_connections()


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    try:
        if not 0 < arguments.heartbeat <= MAX_HEARTBEAT_S:
            raise ConfigError(
                f"--heartbeat is {arguments.heartbeat:g}; it must be above 0 and at most {MAX_HEARTBEAT_S:g} seconds"
            )
        server = _peer("--server", arguments.server, arguments.api_key)
        controller = _peer("--controller-address", arguments.controller_address)
        if arguments.worker_address is not None:
            _peer("--worker-address", arguments.worker_address)
        listener = bind_listener(arguments.host, arguments.port)
    except (PortInUse, ConfigError) as error:
        print(f"quintet: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    setproctitle.setproctitle("quintet-fastchat")
    configure_logging("fastchat", arguments.log_level)
    prepare_listener(listener)
    uvloop.run(serve(server, controller, listener, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
