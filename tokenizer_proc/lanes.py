"""Lanes: thread pools that encode large prompts, by size. Encoding releases the GIL, so the event loop continues.

Huge prompts have a separate lane, so large ones do not wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quintet.process.os_tuning import TRIM_MIN_BYTES, trim_memory

LANES = ((256 << 10, 2), (1 << 62, 1))
"""Per lane: maximum prompt size and number of threads."""

ALLOWANCE_S, SLOWEST_BYTES_PER_S = 1.0, 200 << 10
"""Time limit of encoding in a lane, on a busy machine; a prompt beyond it counts as a stall."""

Result = TypeVar("Result")


class Lanes:
    """The thread pools, and the deadlines of the prompts that they encode."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lanes = [(size, ThreadPoolExecutor(threads, "lane")) for size, threads in LANES]
        self._due_s: dict[object, float] = {}
        """Deadline (`time.monotonic`) of each prompt that a lane is encoding."""

    @property
    def num_late(self) -> int:
        """Number of prompts past their encoding deadline."""
        now_s = time.monotonic()
        return sum(due_s < now_s for due_s in list(self._due_s.values()))

    def run(self, size: int, work: Callable[[], Result], done: Callable[[Result, int, int], None]) -> None:
        """Run ``work`` in a lane. Call ``done`` in the event loop with its result, and its begin and end in monotonic ns."""
        job = object()

        def timed() -> tuple[Result, int, int]:
            self._due_s[job] = time.monotonic() + ALLOWANCE_S + size / SLOWEST_BYTES_PER_S
            began_ns = time.monotonic_ns()
            try:
                return work(), began_ns, time.monotonic_ns()
            finally:
                del self._due_s[job]
                if size >= TRIM_MIN_BYTES:
                    trim_memory()  # before the lane's next prompt allocates as much

        def finish(future: Future[tuple[Result, int, int]]) -> None:
            done(*future.result())
            if size >= TRIM_MIN_BYTES:
                lane.submit(trim_memory)

        def on_done(future: Future[tuple[Result, int, int]]) -> None:
            if not future.cancelled():
                self._loop.call_soon_threadsafe(finish, future)

        lane = next(lane for limit, lane in self._lanes if size <= limit)
        lane.submit(timed).add_done_callback(on_done)

    def close(self) -> None:
        """Finish the prompts being encoded and drop the queued ones."""
        for _, lane in self._lanes:
            lane.shutdown(cancel_futures=True)
