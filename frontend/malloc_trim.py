"""When a frontend gives memory back: a moment after each large body or answer, beside the loop and not in it."""

from __future__ import annotations

import asyncio

from quintet.process.malloc_trim import LEFTOVER_BYTES, give_back_memory

AFTER_S = 1.0
"""How long after a large exchange: its answer may still lie with the connection."""


def leave_behind(num_bytes: int) -> None:
    """An exchange of so many bytes has ended: see that nothing of it stays, if they were many."""
    if num_bytes >= LEFTOVER_BYTES:
        loop = asyncio.get_running_loop()
        loop.call_later(AFTER_S, loop.run_in_executor, None, give_back_memory)
