"""Where what this user's servers make, and find again, is kept."""

from __future__ import annotations

import os
from pathlib import Path

from quintet.wire.errors import ConfigError


def user_cache() -> Path:
    """Return the folder, which may not be there yet. Raises `ConfigError`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "quintet"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder: set HOME, or XDG_CACHE_HOME to a folder for caches"
        ) from None
