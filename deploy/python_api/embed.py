"""``LLM.embed``: vectors of prompts, with vLLM's names of the outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from quintet.deploy.python_api.engine import LocalServer, gathered
from quintet.deploy.python_api.inputs import ReadPrompt
from quintet.frontend.api.pooling.vectors import pooling_of, pooling_params, vector_of
from quintet.wire.request import RequestSpec


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """Result of a prompt."""

    outputs: EmbeddingOutput
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens with a prefix cache hit."""
    finished: bool = True


async def embed(
    server: LocalServer, prompts: Sequence[ReadPrompt], truncate_prompt_tokens: int | None, *, use_tqdm: bool
) -> list[EmbeddingRequestOutput]:
    """Pool all prompts. Raises `RequestError`, and then cancels the others. Call from the engine's loop."""
    pooling = pooling_of(server.config.model)
    params = pooling_params(pooling, truncate_prompt_tokens=truncate_prompt_tokens)
    slots = asyncio.Semaphore(2 * server.config.scheduler.max_num_seqs)

    async def vector(given: ReadPrompt) -> EmbeddingRequestOutput:
        async with slots:
            spec = RequestSpec(
                params, cache_salt=given.cache_salt, pooling=pooling.kind, adapter=given.adapter
            )
            stream = server.requests.submit(given.prompt, spec, interval=None)
            try:
                async for _ in stream:
                    pass
            finally:
                stream.close()
        bar.update()
        assert stream.started is not None, "a request that ended without an error has a vector"
        numbers = vector_of(stream.vector, normalize=pooling.normalize).tolist()
        counts = stream.started.num_prompt_tokens, stream.started.num_cached_tokens
        return EmbeddingRequestOutput(EmbeddingOutput(numbers), *counts)

    with tqdm(total=len(prompts), unit="prompt", disable=not use_tqdm) as bar:
        return await gathered(map(vector, prompts))
