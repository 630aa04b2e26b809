"""Files of the server's user: the cache folder, and shared-secret files that authenticate processes on several machines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from quintet.wire.errors import ConfigError


def user_cache() -> Path:
    """Return the folder, which may not exist yet. Raises `ConfigError`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "quintet"
    except RuntimeError:
        raise ConfigError("the user has no home folder: set HOME or XDG_CACHE_HOME") from None


def cached_folder(target: Path, required: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder of a cache; create it atomically unless it has the ``required`` file.

    fill: writes the files into a temporary folder. Raises `ConfigError` if the cache cannot be read or written.
    """
    try:
        if (target / required).is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
        try:
            fill(temporary)
            os.rename(temporary, target)
        except OSError:
            if not (target / required).is_file():  # not created concurrently by another process
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {target.parent} is not writable ({error.strerror or error}): set XDG_CACHE_HOME to a writable folder"
        ) from None
    return target


LEAST_BYTES = 32


def key_file_of(flag: str, given: str) -> str:
    """Return the absolute path of a key file. Raises `ConfigError` if it cannot be read or is too short."""
    path = Path(given).expanduser().absolute()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{flag} {given}: {error.strerror}") from None
    if not os.access(path, os.R_OK) or size < LEAST_BYTES:
        raise ConfigError(
            f"{flag} {given}: it must be a readable file with at least {LEAST_BYTES} random bytes:"
            f" head -c 32 /dev/urandom > {given}"
        )
    return str(path)
