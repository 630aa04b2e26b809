"""Who may talk: all that have the key file, by CURVE (CurveZMQ, ZeroMQ RFC 26).

All have the same pair of keys, made from the file's content: who cannot say so in the handshake neither asks nor answers.
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
_ASKED = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks who may talk (RFC 27)."""


@dataclass(slots=True, frozen=True)
class PeerKey:
    """The pair of keys that all have."""

    public: bytes
    secret: bytes

    def protect(self, socket: zmq.Socket[bytes], *, listens: bool) -> None:
        """Have a socket talk to those alone that have the key."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        if listens:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)


def read_key(path: str, flag: str, purpose: bytes) -> PeerKey:
    """Return the keys that a file's content makes for a purpose: others for another. Raises `ConfigError`, naming the flag."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if len(content) < LEAST_BYTES:
        raise ConfigError(
            f"{flag} {path} holds {len(content)} bytes; it must hold at least {LEAST_BYTES} that nobody can guess:"
            f" head -c 32 /dev/urandom > {path}"
        )
    secret = z85.encode(hashlib.sha256(purpose + b"\0" + content).digest())
    return PeerKey(zmq.curve_public(secret), secret)


class PeerAuthenticator:
    """Answers ZeroMQ's question who may talk: who has our own key."""

    def __init__(self, context: Context, key: PeerKey) -> None:
        self._public = z85.decode(key.public)
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ASKED)

    def answer(self) -> None:
        """Answer one question, which is there."""
        version, number, _, _, _, _, *credentials = self.socket.recv_multipart()
        code = b"200" if credentials == [self._public] else b"400"
        self.socket.send_multipart([version, number, code, b"", b"", b""])
