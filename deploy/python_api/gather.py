"""Keeps a window of prompts in flight for a synchronous caller, and returns the outputs in order.

    caller's thread                              engine's loop
    next prompt ──── call_soon_threadsafe ─────▶ submit
    wait, yield in order ◀──── SimpleQueue ───── collect (one mailbox for the whole call)

The caller's thread advances the iterator, only as far as the window. The engine's loop has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from quintet.deploy.python_api.engine import WAS_SHUT_DOWN, EngineError, LocalServer
from quintet.deploy.python_api.inputs import ReadPrompt
from quintet.deploy.python_api.outputs import Assembler, RequestMetrics, RequestOutput
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import SamplingParams

LOOK_S = 1.0
"""Interval at which a waiting thread checks that the loop is running."""

Ending = RequestOutput | Exception
"""Result of a request; an exception is an internal error, raised in the caller's thread."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """One prompt with validated ``params``."""

    request_id: str
    prompt: ReadPrompt
    params: SamplingParams
    priority: int = 0
    clamp_max_tokens: bool = False
    """See `quintet.wire.messages.Submit`."""


def refused(request_id: str, error: RequestError) -> RequestOutput:
    metrics = RequestMetrics(time.monotonic(), None, None)
    return RequestOutput(request_id, None, [], None, [], True, metrics, error=error)


class Gather:
    """Requests of one call. Create and iterate it in the caller's thread; close it when done."""

    def __init__(
        self,
        engine: LocalServer,
        loop: asyncio.AbstractEventLoop,
        jobs: Iterator[CheckedPrompt | RequestOutput],
        window: int,
    ) -> None:
        """``jobs`` may contain outputs of rejected prompts, which keep their position."""
        self._engine = engine
        self._loop = loop
        self._jobs = jobs
        self._window = window
        self._done: SimpleQueue[tuple[int, Ending]] = SimpleQueue()
        self._ready: dict[int, Ending] = {}
        self._mailbox = Mailbox()
        self._open: dict[Stream, tuple[int, Assembler]] = {}
        self._collector: asyncio.Task[None] | None = None
        self._num_submitted = 0
        self._next = 0
        self._is_exhausted = False
        self._is_closed = False

    def outputs(self) -> Generator[RequestOutput, None, None]:
        """Yield the outputs in the order of the prompts; a failed request has ``error`` set.

        Raises internal errors of the engine's loop, and `EngineError` if the loop has stopped.
        """
        try:
            while True:
                self._fill()
                if self._next == self._num_submitted:
                    return
                while self._next not in self._ready:
                    self._wait_for_one()
                self._next += 1
                ending = self._ready.pop(self._next - 1)
                if isinstance(ending, Exception):
                    raise ending
                yield ending
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(self._close)

    def _wait_for_one(self) -> None:
        while True:
            try:
                index, ending = self._done.get(timeout=LOOK_S)
            except Empty:
                if self._loop.is_running():
                    continue
                self._engine.check()
                raise EngineError(WAS_SHUT_DOWN) from None
            self._ready[index] = ending
            return

    def _fill(self) -> None:
        """Submit prompts until the window is full, or the next output is ready."""
        while not self._is_exhausted and self._num_submitted - self._next < self._window:
            prompt = next(self._jobs, None)
            if prompt is None:
                self._is_exhausted = True
                return
            index = self._num_submitted
            self._num_submitted += 1
            if isinstance(prompt, CheckedPrompt):
                try:
                    self._loop.call_soon_threadsafe(self._submit, index, prompt)
                except RuntimeError:  # the loop is closed
                    raise EngineError(WAS_SHUT_DOWN) from None
            else:
                self._ready[index] = prompt
            self._take_done()
            if self._next in self._ready:
                return

    def _take_done(self) -> None:
        try:
            while True:
                index, ending = self._done.get_nowait()
                self._ready[index] = ending
        except Empty:
            return

    # --- on the engine's loop ---

    def _submit(self, index: int, prompt: CheckedPrompt) -> None:
        """Submit a prompt; pass exceptions to the caller's thread, which would otherwise wait forever."""
        if self._is_closed:
            return
        try:
            self._submit_checked(index, prompt)
        except EngineError as error:
            self._done.put(
                (index, refused(prompt.request_id, RequestError(ErrorCode.UNAVAILABLE, str(error))))
            )
        except RequestError as error:
            self._done.put((index, refused(prompt.request_id, error)))
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            self._done.put((index, error))

    def _submit_checked(self, index: int, prompt: CheckedPrompt) -> None:
        self._engine.check()
        stream = self._engine.submit_read(
            prompt.prompt, prompt.params, prompt.priority, self._mailbox, prompt.clamp_max_tokens
        )
        self._open[stream] = (index, Assembler(prompt.request_id, prompt.prompt.text, stream))
        if self._collector is None:
            self._collector = self._loop.create_task(self._collect())

    async def _collect(self) -> None:
        while True:
            for stream in await self._mailbox.wait():
                index, assembler = self._open.pop(stream)
                try:
                    self._done.put((index, _output(stream, assembler)))
                except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                    self._done.put((index, error))

    def _close(self) -> None:
        self._is_closed = True
        for stream in self._open:
            stream.close()
        self._open.clear()
        if self._collector is not None:
            self._collector.cancel()


def _output(stream: Stream, assembler: Assembler) -> RequestOutput:
    output = assembler.add(stream.take())
    if output is None:
        return assembler.failed(RequestError(ErrorCode.INTERNAL, "The request ended without an output."))
    return output


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def shut_down(engine: LocalServer, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Shut down an `LLM`: fail requests in flight, stop the loop's thread, then the processes.

    The garbage collector may call it in any thread, also in the loop's own.
    """

    if not engine.is_ours:
        return

    async def stop_loop() -> None:
        try:
            engine.fail_for_shutdown()
        finally:
            engine.detach()
            await asyncio.sleep(0)  # two iterations, so that collectors deliver the errors
            await asyncio.sleep(0)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            loop.call_soon(loop.stop)

    stopping = asyncio.run_coroutine_threadsafe(stop_loop(), loop) if thread.is_alive() else None
    if stopping is not None and thread is threading.current_thread():
        stopping.add_done_callback(lambda _: engine.stop())
        return
    thread.join(5)
    engine.stop()
    if stopping is not None and stopping.done():
        stopping.result()
