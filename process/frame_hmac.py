"""HMAC of every frame: proves that the sender has the server's key.

It owns the key file in the run folder and the digest after a frame's payload. It does not detect repeated frames, so
receivers drop messages that they have already applied.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from pathlib import Path

KEY_FILE = "key"
KEY_BYTES = 32
HMAC_BYTES = 16


def run_key(run_dir: str | Path) -> bytes:
    """Return the key of the server in this folder; the first call creates it, readable only by its user."""
    path = Path(run_dir) / KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    unfinished = path.with_name(f".{KEY_FILE}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, os.urandom(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)  # atomic: if two processes create it, both read the winner's
    finally:
        os.close(descriptor)
        unfinished.unlink()
    return path.read_bytes()


class FrameHmac:
    """Adds and checks HMAC-SHA-256 (RFC 2104), truncated to `HMAC_BYTES`.

    CPU instructions make it twice as fast as keyed BLAKE2b for the frames of a large step. Both pads are hashed once
    here instead of per frame.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"the key has {len(key)} bytes, but {KEY_BYTES} are expected: its file is damaged"
            )
        block = key.ljust(hashlib.sha256().block_size, b"\0")
        self._begin_inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block)).copy
        self._begin_outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block)).copy

    def _digest(self, payload: bytes | memoryview) -> bytes:
        inner, outer = self._begin_inner(), self._begin_outer()
        inner.update(payload)
        outer.update(inner.digest())
        return outer.digest()[:HMAC_BYTES]

    def sign(self, payload: bytes) -> bytes:
        """Return the frame that carries ``payload``."""
        return payload + self._digest(payload)

    def verify(self, frame: bytes) -> memoryview | None:
        """Return the payload of a frame, or None when its HMAC is invalid."""
        payload = memoryview(frame)[:-HMAC_BYTES]
        return payload if hmac.compare_digest(self._digest(payload), frame[-HMAC_BYTES:]) else None
