"""Keeps a window of prompts in flight for a caller that is not asynchronous, and gives the outputs back in order.

    caller's thread                              engine's loop
    next prompt ──── call_soon_threadsafe ─────▶ submit
    wait, yield in order ◀──── SimpleQueue ───── collect (one mailbox for the whole call)

The caller's iterator is advanced in the caller's thread and only as far as the window reaches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from quintet.deploy.python_api.engine import Engine, EngineError
from quintet.deploy.python_api.inputs import ReadPrompt
from quintet.deploy.python_api.outputs import Assembler, RequestMetrics, RequestOutput
from quintet.frontend.sessions import Mailbox, Stream
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to serve. ``params`` have been checked."""

    request_id: str
    prompt: ReadPrompt
    params: SamplingParams
    priority: int = 0


def refused(request_id: str, error: RequestError) -> RequestOutput:
    """Return the output of a prompt that was not even submitted."""
    metrics = RequestMetrics(time.monotonic(), None, None)
    return RequestOutput(request_id, None, [], None, [], True, metrics, error=error)


class Gather:
    """One call's requests. Construct it in the caller's thread and iterate it there; close it when done."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        jobs: Iterator[Job | RequestOutput],
        window: int,
    ) -> None:
        """``jobs`` may contain outputs that are there already: refused prompts. They keep their place."""
        self._engine = engine
        self._loop = loop
        self._jobs = jobs
        self._window = window
        self._done: SimpleQueue[tuple[int, RequestOutput]] = SimpleQueue()
        self._ready: dict[int, RequestOutput] = {}
        self._mailbox = Mailbox()
        self._open: dict[Stream, tuple[int, Assembler]] = {}
        self._collector: asyncio.Task[None] | None = None
        self._num_submitted = 0
        self._next = 0
        self._is_exhausted = False
        self._is_closed = False

    def outputs(self) -> Generator[RequestOutput, None, None]:
        """Yield the outputs in the order of the prompts; a request that failed has ``error`` set."""
        try:
            while True:
                self._fill()
                if self._next == self._num_submitted:
                    return
                while self._next not in self._ready:
                    index, output = self._done.get()
                    self._ready[index] = output
                self._next += 1
                yield self._ready.pop(self._next - 1)
        finally:
            if self._loop.is_running():
                self._loop.call_soon_threadsafe(self._close)

    def _fill(self) -> None:
        """Submit prompts until the window is full, or the next output is there to be given."""
        while not self._is_exhausted and self._num_submitted - self._next < self._window:
            job = next(self._jobs, None)
            if job is None:
                self._is_exhausted = True
                return
            index = self._num_submitted
            self._num_submitted += 1
            if isinstance(job, Job):
                self._loop.call_soon_threadsafe(self._submit, index, job)
            else:
                self._ready[index] = job
            self._take_done()
            if self._next in self._ready:
                return

    def _take_done(self) -> None:
        try:
            while True:
                index, output = self._done.get_nowait()
                self._ready[index] = output
        except Empty:
            return

    # --- on the engine's loop ---

    def _submit(self, index: int, job: Job) -> None:
        if self._is_closed:
            return
        try:
            self._engine.check()
        except EngineError as error:
            self._done.put((index, refused(job.request_id, RequestError(ErrorCode.UNAVAILABLE, str(error)))))
            return
        if self._collector is None:
            self._collector = self._loop.create_task(self._collect())
        read = job.prompt
        stream = self._engine.sessions.submit(
            read.prompt,
            job.params,
            priority=job.priority,
            cache_salt=read.cache_salt,
            return_prompt_ids=True,
            mailbox=self._mailbox,
            final_only=True,
        )
        self._open[stream] = (index, Assembler(job.request_id, read.text, stream))

    async def _collect(self) -> None:
        while True:
            for stream in await self._mailbox.wait():
                index, assembler = self._open.pop(stream)
                batch = stream.take()
                if batch.started is not None:
                    assembler.start(batch.started)
                output = assembler.add(batch.deltas)
                if batch.error is not None:
                    output = assembler.failed(batch.error)
                elif output is None:
                    output = assembler.failed(
                        RequestError(ErrorCode.INTERNAL, "The request ended without an output.")
                    )
                self._done.put((index, output))

    def _close(self) -> None:
        self._is_closed = True
        for stream in self._open:
            stream.close()
        self._open.clear()
        if self._collector is not None:
            self._collector.cancel()
