"""The HTTP server of a frontend: its listening socket, and uvicorn with CORS, the configured middleware and TLS."""

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

import uvicorn
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.http.connection import IDLE_S, Protocol
from quintet.frontend.http.cors import with_cors
from quintet.wire.config import FrontendConfig
from quintet.wire.errors import ConfigError

LISTEN_FD = "QUINTET_LISTEN_FD"
"""Environment variable with the number of the listening socket's descriptor, made by the supervisor."""
SEND_BUFFER_BYTES = 64 << 10
"""SO_SNDBUF of client sockets. Linux doubles it; its own default grows to 4 MiB."""


def inherited_listener() -> socket.socket:
    """Return the listening socket inherited from the supervisor."""
    number = os.environ.get(LISTEN_FD, "")
    if not number.isdigit():
        raise ConfigError(
            f"{LISTEN_FD} is {number!r}; it must be the file descriptor of a listening socket. "
            "Start the server with `quintet serve`."
        )
    listener = socket.socket(fileno=int(number))
    prepare_listener(listener)
    return listener


def prepare_listener(listener: socket.socket) -> None:
    """Make a listener nonblocking, bound the kernel's send buffer of its clients, and raise the limit of open files.

    Each connection takes one descriptor: the soft limit becomes the hard limit.
    """
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
