"""Cache folder of this user's servers."""

from __future__ import annotations

import os
from pathlib import Path

from quintet.wire.errors import ConfigError


def user_cache() -> Path:
    """Return the folder, which may not exist yet. Raises `ConfigError`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "quintet"
    except RuntimeError:
        raise ConfigError("the user has no home folder: set HOME or XDG_CACHE_HOME") from None
