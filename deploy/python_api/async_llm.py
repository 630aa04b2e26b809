"""``AsyncLLM``: asyncio API, on the program's event loop."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from quintet.deploy.python_api.engine import EngineError, LocalServer, options_of_call
from quintet.deploy.python_api.inputs import (
    ChatOptions,
    Conversation,
    LoRARequest,
    PromptInput,
    ReadPrompt,
    read_prompt,
    read_text,
    read_token_ids,
    with_adapter,
)
from quintet.deploy.python_api.outputs import Assembler, RequestOutput
from quintet.frontend.streams import Stream
from quintet.wire.codec import unpack_i32
from quintet.wire.messages import TextPrompt
from quintet.wire.params import SamplingParams


class AsyncLLM:
    """Engine for asyncio programs. The constructor blocks while the processes start.

    Takes the arguments of `LLM`. Bound to the event loop that first calls it, until that loop is closed. Close it with
    `shutdown`, or use ``async with AsyncLLM(...) as llm``.
    """

    def __init__(self, model: str | None = None, **flags: object) -> None:
        self._engine = LocalServer(options_of_call(model, flags, "AsyncLLM(...)"))
        self._streams: dict[str, Stream] = {}
        self._request_ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown = weakref.finalize(self, self._engine.stop)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yield outputs as tokens arrive, in the form of ``output_kind``.

        `abort` with the same ``request_id``, or closing the iterator early, ends the request with ``finish_reason`` "abort".
        Raises `RequestError`.
        """
        model = self._engine.config.model
        read = with_adapter(read_prompt(prompt, model.vocab_size), lora_request, model)
        async for output in self._serve(read, sampling_params, request_id, priority):
            yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: ChatOptions = ChatOptions(),  # noqa: B008 - frozen
        priority: int = 0,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one conversation; otherwise like `generate`."""
        read = with_adapter(options.read(messages), lora_request, self._engine.config.model)
        async for output in self._serve(read, sampling_params, request_id, priority):
            yield output

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator yields the partial output with ``finish_reason`` "abort". Ignores unknown ids."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        self._attach()
        answer = await self._engine.queries.tokenize(TextPrompt(read_text(text, "text"), add_special_tokens))
        return list(unpack_i32(answer.token_ids))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        self._attach()
        ids = read_token_ids(token_ids, self._engine.config.model.vocab_size)
        return await self._engine.queries.detokenize(ids)

    async def check_health(self) -> None:
        """Raise `EngineError` unless every kind of process is running."""
        self._attach()
        missing = self._engine.requests.workers.missing()
        if missing:
            raise EngineError(f"no {missing[0]} process is ready; the supervisor is restarting it")

    def shutdown(self) -> None:
        """Stop the processes. Idempotent."""
        try:
            if self._loop is not None and not self._loop.is_closed():
                self._detach()
        finally:
            self._shutdown()

    def _detach(self) -> None:
        try:
            self._engine.fail_for_shutdown()
        finally:
            self._engine.detach()

    async def __aenter__(self) -> Self:
        self._attach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _attach(self) -> None:
        self._engine.check()
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop and not self._loop.is_closed():
            raise RuntimeError(
                "this AsyncLLM is bound to another event loop that is still open; create one AsyncLLM per loop"
            )
        self._loop = loop
        self._engine.attach(loop)

    async def _serve(
        self, read: ReadPrompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        self._attach()
        name = request_id if request_id is not None else f"async-{next(self._request_ids)}"
        if name in self._streams:
            raise ValueError(f"request id {name!r} is in use by an unfinished request")
        stream = self._engine.submit(read, params, priority)
        self._streams[name] = stream
        assembler = Assembler(name, read.text, stream)
        try:
            async for batch in stream:
                output = assembler.add(batch)
                if output is not None:
                    yield output
        finally:
            del self._streams[name]
            stream.close()
