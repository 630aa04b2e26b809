"""The listening socket: bound before any process is spawned, inherited by every frontend."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from quintet.wire.errors import ConfigError

_BACKLOG = 2048
MAX_PORT = 65535


class PortInUse(Exception):
    """Another program listens on the address; the message is for the user."""


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket and listen. The file's permissions control access; the caller unlinks it.

    A stale socket file is replaced. Raises `PortInUse` if another program accepts connections on it, or `ConfigError`.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket() and _is_abandoned(path):
            Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"{path} is in use by another program, or is not a socket; stop it, or choose another path with --uds"
            ) from None
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return listener


def _is_abandoned(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind and listen. Port 0 selects a free port; read it from ``getsockname()``.

    Raises `PortInUse`, or `ConfigError` for an invalid port or an address that cannot be bound.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port is {port}; a port is from 0 (a free one) to {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    # Clients of a name with addresses of both families, such as localhost, try or fall back to IPv4.
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    try:
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            on_error.pop_all()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program; stop it, or choose another with --port (0 picks one)"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def check_free(host: str, port: int, flag: str) -> None:
    """Raise `PortInUse`, naming the flag, if another program listens on the port."""
    try:
        bind_listener(host, port).close()
    except PortInUse:
        raise PortInUse(
            f"port {port} on {host} is in use by another program; stop it, or choose another with {flag}"
        ) from None
