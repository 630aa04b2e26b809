"""Runs a load: sends requests with fixed concurrency or at given arrival times, and collects the outcomes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.tools.load_client.tally import Chunk, StreamTally


@dataclass(frozen=True, slots=True)
class Load:
    target: Target
    path: str
    bodies: Sequence[bytes]
    concurrency: int | None = None
    """Maximum number of requests in flight; None for no limit."""
    arrivals_s: Sequence[float] | None = None
    """Arrival time of each request in seconds from the start; None: limited by ``concurrency`` only."""
    timeout_s: float = 600.0


@dataclass(slots=True)
class Outcome:
    """Outcome of one request. Times are `time.perf_counter` seconds."""

    due_s: float
    start_s: float
    end_s: float
    tally: StreamTally
    failure: str | None = None
    """Failure category; None if the stream was complete."""
    message: str = ""


@dataclass(slots=True, repr=False)
class Run:
    """A finished run. Without repr, because asyncio.Runner formats the task's result."""

    start_s: float
    end_s: float
    outcomes: list[Outcome] = field(default_factory=list)


def run_load(load: Load, on_outcome: Callable[[Outcome], None] | None = None) -> Run:
    """Send all requests of ``load`` and wait for them; call ``on_outcome`` for each finished one.

    Failures are outcomes, not exceptions. Ctrl-C cancels requests in flight and returns the finished ones.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_drive(load, on_outcome))
    finally:
        if collecting:
            gc.enable()


def error_message(body: bytes) -> str:
    """Return the message of an error response, or the start of its body in an unknown format."""
    try:
        chunk = msgspec.json.decode(body, type=Chunk)
    except msgspec.MsgspecError:
        chunk = Chunk()
    if isinstance(chunk.error, str):
        return chunk.error
    if chunk.error is not None and chunk.error.message:
        return chunk.error.message
    return body[:200].decode(errors="replace").strip()


async def _drive(load: Load, on_outcome: Callable[[Outcome], None] | None) -> Run:
    pool = ConnectionPool(load.target)
    run = Run(time.perf_counter(), 0.0)
    upcoming = iter(range(len(load.bodies)))

    async def one(index: int, due_s: float) -> None:
        outcome = await _request(load, pool, load.bodies[index], due_s)
        run.outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)

    async def worker() -> None:
        for index in upcoming:
            await one(index, time.perf_counter())

    async def at_arrivals(arrivals_s: Sequence[float]) -> None:
        slots = asyncio.Semaphore(load.concurrency or len(load.bodies) or 1)

        async def in_slot(index: int, due_s: float) -> None:
            async with slots:
                await one(index, due_s)

        async with asyncio.TaskGroup() as group:
            for index in upcoming:
                due_s = run.start_s + arrivals_s[index]
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(in_slot(index, due_s))

    try:
        if load.arrivals_s is not None:
            await at_arrivals(load.arrivals_s)
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(load.concurrency or 1, len(load.bodies))):
                    group.create_task(worker())
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    finally:
        run.end_s = time.perf_counter()
        await pool.close()
    return run


async def _request(load: Load, pool: ConnectionPool, body: bytes, due_s: float) -> Outcome:
    tally = StreamTally()
    request = load.target.request("POST", load.path, body)
    start_s = time.perf_counter()
    failure: str | None = None
    message = ""
    try:
        async with asyncio.timeout(load.timeout_s):
            answer = await pool.exchange(request, is_repeatable=True, sink=tally)
    except TimeoutError:
        failure, message = "timeout", f"no complete response within {load.timeout_s:g} s"
    except OSError as error:
        is_refused = isinstance(error.__cause__, ConnectionRefusedError)
        failure, message = "refused" if is_refused else "broken connection", str(error)
    end_s = time.perf_counter()
    tally.finish(end_s)
    if failure is None:
        if answer.status != 200:
            failure, message = f"HTTP {answer.status}", error_message(answer.body)
        elif tally.error is not None:
            failure, message = "error in the stream", tally.error
        elif not tally.done:
            failure, message = "stream without [DONE]", error_message(answer.body)
    return Outcome(due_s, start_s, end_s, tally, failure, message)
