"""The seal on every frame: whoever made it had the server's key.

Owns the key file in the run folder and the digest that follows a frame's payload. Knows nothing of messages. A seal says
who may speak, not when: a frame that is repeated verifies again, so receivers drop what they have already applied.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from pathlib import Path

KEY_FILE = "key"
KEY_BYTES = 32
SEAL_BYTES = 16


def run_key(run_dir: str | Path) -> bytes:
    """Return the key of the server in this folder; whoever asks first makes it, readable by its user alone."""
    path = Path(run_dir) / KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    unfinished = path.with_name(f".{KEY_FILE}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, os.urandom(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)  # appears whole, once: of two who make one, both read the winner's
    finally:
        os.close(descriptor)
        unfinished.unlink()
    return path.read_bytes()


class Seal:
    """Seals and opens frames with BLAKE2b, keyed (Aumasson, Neves, Wilcox-O'Hearn and Winnerlein, 2013; RFC 7693)."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes, not {KEY_BYTES}: is its file damaged?")
        self._begin = hashlib.blake2b(key=key, digest_size=SEAL_BYTES).copy
        """Begins a digest that has taken the key already."""

    def close(self, payload: bytes) -> bytes:
        """Return the frame that carries ``payload``."""
        digest = self._begin()
        digest.update(payload)
        return payload + digest.digest()

    def open(self, frame: bytes) -> memoryview | None:
        """Return the payload of a frame, or None when its maker had not the key."""
        view = memoryview(frame)
        payload = view[:-SEAL_BYTES]
        digest = self._begin()
        digest.update(payload)
        return payload if hmac.compare_digest(digest.digest(), view[-SEAL_BYTES:]) else None
