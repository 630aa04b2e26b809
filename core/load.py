"""How full the core is, as numbers for operators and for whoever chooses among cores."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.core.state import State


@dataclass(slots=True, frozen=True)
class Load:
    """One moment."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the blocks that requests hold, 0 to 1; cached content that could be evicted is not usage."""


def load_of(state: State) -> Load:
    """Measure the state."""
    pool = state.pool
    return Load(
        len(state.running), len(state.waiting), pool.num_used / pool.num_blocks if pool.num_blocks else 0.0
    )
