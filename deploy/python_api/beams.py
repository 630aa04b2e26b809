"""``LLM.beam_search``: parameters and outputs with vLLM's names; the frontend implements the search."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.deploy.python_api.engine import LocalServer, gathered
from quintet.deploy.python_api.inputs import ReadPrompt
from quintet.deploy.python_api.outputs import Position, read_position
from quintet.frontend.beam_search import Beam, BeamOptions, EarlyStopping, output_limit, search
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.codec import unpack_i32
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import invalid
from quintet.wire.messages import PositionLogprobs, Prompt, TokenPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Must be 0: beam search does not sample."""
    length_penalty: float = 1.0
    """Score = log-probability / length ** length_penalty."""
    early_stopping: EarlyStopping = False
    """As in `quintet.frontend.beam_search.BeamOptions`, and in transformers."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One result sequence."""

    tokens: list[int]
    """Tokens of the prompt and the output."""
    logprobs: list[Position]
    """One per output token: the token itself, and the ``2 * beam_width`` most likely ones."""
    cum_logprob: float
    score: float
    """Ranking score."""
    text: str
    """Text of all ``tokens``."""
    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Results of one prompt: ``beam_width`` sequences, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


async def beam_search(
    server: LocalServer, prompts: Sequence[ReadPrompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Run beam search for all prompts concurrently. Raises `RequestError`. Call from the engine's loop."""
    model = server.config.model
    if params.temperature != 0:
        raise invalid(
            f"temperature is {params.temperature}; it must be 0: beam search does not sample.",
            "temperature",
        )
    ends = frozenset(() if params.ignore_eos else model.eos_token_ids)
    width = params.beam_width
    options = BeamOptions(
        width, params.max_tokens, params.length_penalty, params.early_stopping, ends, 2 * width, "beam_width"
    )
    ids = [await _ids_of(server, each.prompt) for each in prompts]
    for each in ids:
        output_limit(len(each), params.max_tokens, model.max_model_len, "prompt")
    slots = asyncio.Semaphore(max(1, server.config.scheduler.max_num_seqs // width))

    async def answer(own: list[int], read: ReadPrompt) -> BeamSearchOutput:
        async with slots:
            (beams,) = await search([own], [options], functools.partial(_next_tokens, server, read))
            return BeamSearchOutput([await _sequence(server, own, beam, ends) for beam in beams])

    return await gathered(answer(own, each) for own, each in zip(ids, prompts, strict=True))


async def _next_tokens(
    server: LocalServer, read: ReadPrompt, prompts: Sequence[TokenPrompt], params: SamplingParams
) -> list[PositionLogprobs]:
    """Return the next-token log-probabilities of several prompts."""
    mailbox = Mailbox()
    streams: list[Stream] = []
    found: dict[int, PositionLogprobs] = {}
    spec = RequestSpec(params, cache_salt=read.cache_salt, adapter=read.adapter)
    try:
        for prompt in prompts:
            streams.append(server.requests.submit(prompt, spec, mailbox=mailbox, interval=None))
        while len(found) < len(streams):
            for stream in await mailbox.wait():
                batch = stream.take()
                if batch.error is not None:
                    raise batch.error
                for delta in batch.deltas:
                    found[stream.request_id] = delta.logprobs[0]
    finally:
        for stream in streams:
            stream.close()
    return [found[stream.request_id] for stream in streams]


async def _ids_of(server: LocalServer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, EmbedsPrompt):
        raise invalid(
            "prompt is prompt_embeds; beam search requires tokens: pass text or token ids.",
            "prompt",
        )
    if isinstance(prompt, TokenPrompt):
        return list(unpack_i32(prompt.token_ids))
    ids = list(unpack_i32((await server.queries.tokenize(prompt)).token_ids))
    if not ids:
        raise invalid("prompt is empty: it has no tokens; pass some text.", "prompt")
    return ids


async def _sequence(
    server: LocalServer, prompt: list[int], beam: Beam, ends: frozenset[int]
) -> BeamSearchSequence:
    tokens = [*prompt, *beam.token_ids]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[read_position(position) for position in beam.positions],
        cum_logprob=beam.logprob,
        score=beam.score,
        text=await server.queries.detokenize(tokens),
        finish_reason="stop" if tokens[-1] in ends else "length",
    )
