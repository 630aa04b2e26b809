"""Lanes: thread pools that encode large prompts, by size, and the requests in them.

Encoding releases the GIL, so the event loop continues. Huge prompts have a separate lane, so large ones do not wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec

from quintet.process.os_tuning import TRIM_MIN_BYTES, trim_memory
from quintet.wire.messages import Cancel, Submit

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


class OffloadedRequests:
    """The requests in lanes: newest attempt, and choices cancelled meanwhile."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Submit, set[int]]] = {}
        """Request and cancelled choices, by the id of the first choice."""
        self._first: dict[int, int] = {}
        """Id of the first choice, by the id of any choice of the request."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, submit: Submit) -> None:
        """Record that a request enters a lane."""
        self._waiting[submit.request_id] = submit, set()
        for request_id in _choices(submit):
            self._first[request_id] = submit.request_id

    def remove(self, submit: Submit) -> set[int] | None:
        """Remove a request that left its lane; return its cancelled choices, or None if this attempt is superseded."""
        waiting = self._waiting.get(submit.request_id)
        if waiting is None or waiting[0] is not submit:
            return None
        self._forget(submit.request_id)
        return waiting[1]

    def cancel(self, cancel: Cancel) -> Cancel | None:
        """Record cancelled requests in lanes; return the rest of the message for the core, or None."""
        rest, moved = [], set()
        for request_id in cancel.request_ids:
            first = self._first.get(request_id)
            if first is None:
                rest.append(request_id)
            elif cancel.moved:
                moved.add(first)
            else:
                self._waiting[first][1].add(request_id)
        for first in moved:
            self._forget(first)
        return msgspec.structs.replace(cancel, request_ids=rest) if rest else None

    def clear(self) -> None:
        self._waiting.clear()
        self._first.clear()

    def _forget(self, first: int) -> None:
        submit, _ = self._waiting.pop(first)
        for request_id in _choices(submit):
            self._first.pop(request_id, None)


def _choices(submit: Submit) -> range:
    return range(submit.request_id, submit.request_id + submit.spec.params.n)
