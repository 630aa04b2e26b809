"""``LLMEngine``: step-wise API for programs that drive the engine from their own loop.

The engine processes compute continuously; `LLMEngine.step` returns the outputs that arrived since the last call. No thread and
no running event loop are needed: `step` receives messages while it waits.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from quintet.deploy.python_api.engine import LocalServer, options_of_call
from quintet.deploy.python_api.inputs import LoRARequest, PromptInput, read_prompt, with_adapter
from quintet.deploy.python_api.outputs import Assembler, RequestOutput
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.params import SamplingParams


class LLMEngine:
    """Engine with requests identified by the caller. The constructor blocks while the processes start.

    Takes the arguments of `LLM`. Not thread-safe, and not usable in a running event loop; use `AsyncLLM` there. Close it with
    `shutdown` or as a context manager; otherwise it closes at exit.
    """

    def __init__(self, model: str | None = None, **flags: object) -> None:
        self._server = LocalServer(options_of_call(model, flags, "LLMEngine(...)"))
        self._loop = asyncio.new_event_loop()
        self._mailbox = Mailbox()
        self._open: dict[str, tuple[Stream, Assembler]] = {}
        self._names: dict[int, str] = {}
        """Stream id -> request id."""
        self._shutdown = weakref.finalize(self, _shut_down, self._server, self._loop)

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | str | None = None,
    ) -> None:
        """Submit a request; `step` returns its outputs in the form of ``output_kind``.

        Raises `RequestError` for an invalid prompt or invalid parameters, `ValueError` for an id in use, and `TypeError` for an
        id that is not a string. Later errors are outputs with ``error`` set.
        """
        self._server.check()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}; it must be a string")
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        model = self._server.config.model
        read = with_adapter(read_prompt(prompt, model.vocab_size), lora_request, model)

        async def submit() -> Stream:
            self._server.attach(self._loop)
            return self._server.submit(read, params, priority, self._mailbox)

        stream = self._loop.run_until_complete(submit())
        self._open[request_id] = stream, Assembler(request_id, read.text, stream)
        self._names[stream.request_id] = request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests, without further outputs. Unknown ids are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if name in self._open:
                stream = self._remove(name)
                self._loop.run_until_complete(_close(stream))

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests with outputs that `step` has not returned yet."""
        return len(self._open)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has further outputs."""
        return bool(self._open)

    def step(self) -> list[RequestOutput]:
        """Wait until outputs arrive, and return them.

        Returns an empty list at once if there are no unfinished requests. Raises `EngineError` if the processes have failed.
        """
        while self._open:
            self._server.check()
            outputs = self._loop.run_until_complete(self._next_outputs())
            if outputs:
                return outputs
        return []

    def shutdown(self) -> None:
        """Stop the processes. Idempotent."""
        self._open.clear()
        self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _next_outputs(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for stream in await self._mailbox.wait():
            name = self._names.get(stream.request_id)
            if name is None:
                continue  # aborted meanwhile
            _, assembler = self._open[name]
            has_ended = stream.ended
            output = assembler.add(stream.take())
            if has_ended:
                self._remove(name)
            if output is not None:
                outputs.append(output)
        return outputs

    def _remove(self, name: str) -> Stream:
        stream, _ = self._open.pop(name)
        del self._names[stream.request_id]
        return stream


async def _close(stream: Stream) -> None:
    stream.close()


def _shut_down(server: LocalServer, loop: asyncio.AbstractEventLoop) -> None:
    if server.is_ours and not loop.is_closed():
        server.detach()
        loop.close()
    server.stop()
