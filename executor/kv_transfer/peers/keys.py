"""Authentication by a shared key file, with CURVE (CurveZMQ, ZeroMQ RFC 26).

All servers derive the same key pair from the file's content. A connection without this key fails in the handshake.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from quintet.wire.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]
LEAST_BYTES = 32
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Address of ZeroMQ's authentication requests (ZAP, RFC 27)."""


@dataclass(slots=True, frozen=True)
class PeerKey:
    """The key pair that all servers share."""

    public: bytes
    secret: bytes

    def protect(self, socket: zmq.Socket[bytes], *, listens: bool) -> None:
        """Restrict a socket to peers with the same key."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        if listens:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)


def read_key(path: str, flag: str, purpose: bytes) -> PeerKey:
    """Derive the key pair for a purpose from a file's content. Raises `ConfigError` that names the flag."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if len(content) < LEAST_BYTES:
        raise ConfigError(
            f"{flag} {path} has {len(content)} bytes; it must have at least {LEAST_BYTES} random bytes:"
            f" head -c 32 /dev/urandom > {path}"
        )
    secret = z85.encode(hashlib.sha256(purpose + b"\0" + content).digest())
    return PeerKey(zmq.curve_public(secret), secret)


class PeerAuthenticator:
    """Answers ZeroMQ's authentication requests: accepts only our own public key."""

    def __init__(self, context: Context, key: PeerKey) -> None:
        self._public = z85.decode(key.public)
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer one waiting request."""
        version, number, _, _, _, _, *credentials = self.socket.recv_multipart()
        code = b"200" if credentials == [self._public] else b"400"
        self.socket.send_multipart([version, number, code, b"", b"", b""])
