"""Files with a secret by which processes on several machines know each other."""

from __future__ import annotations

import os
from pathlib import Path

from quintet.wire.errors import ConfigError

LEAST_BYTES = 32


def key_file_of(flag: str, given: str) -> str:
    """Return the whole path of a file that a flag names; reject one that cannot be read or is easily guessed."""
    path = Path(given).expanduser().absolute()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{flag} {given}: {error.strerror}") from None
    if not os.access(path, os.R_OK) or size < LEAST_BYTES:
        raise ConfigError(
            f"{flag} {given}: must be a file that the server may read, with {LEAST_BYTES} bytes or more that nobody"
            f" can guess: head -c 32 /dev/urandom > {given}"
        )
    return str(path)
