"""Returns free heap memory to the system shortly after a large request, in a thread."""

from __future__ import annotations

import asyncio

from quintet.process.malloc_trim import TRIM_MIN_BYTES, trim_memory

AFTER_S = 1.0
"""Delay after a large request: the connection may still hold its response."""


def schedule_trim(num_bytes: int) -> None:
    """Schedule a heap trim if a request that ended was large."""
    if num_bytes >= TRIM_MIN_BYTES:
        loop = asyncio.get_running_loop()
        loop.call_later(AFTER_S, loop.run_in_executor, None, trim_memory)
