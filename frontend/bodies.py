"""What this process holds of request bodies that have not arrived whole, and how long it waits for the rest."""

from __future__ import annotations

from dataclasses import dataclass

PROGRESS_S = 60.0
MAX_OPEN_BYTES = 256 << 20


@dataclass(slots=True)
class Bodies:
    """The limits of request bodies, and the bytes of those being received."""

    max_bytes: int
    """Largest body taken."""
    progress_s: float = PROGRESS_S
    """Longest wait for the next piece of a body."""
    max_open_bytes: int = MAX_OPEN_BYTES
    """Most bytes of unfinished bodies together."""
    num_open_bytes: int = 0
