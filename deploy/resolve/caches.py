"""Where what this user's servers make, and find again, is kept."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder, which may not be there yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quintet"
