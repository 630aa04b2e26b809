"""Beam search over the engine: in each round every running beam of every prompt is a request for one token.

What beams share is in the prefix cache, so a round computes little more than the tokens that are new. Each request is an ordinary
one: it survives whoever dies, and the answer depends on nothing but the tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from quintet.frontend.beam_search import Beam, BeamOptions, BeamSearch
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import PositionLogprobs, TokenPrompt
from quintet.wire.params import SamplingParams

Ask = Callable[[Sequence[TokenPrompt], SamplingParams], Awaitable[Sequence[PositionLogprobs]]]
"""Has one token drawn behind each prompt, and returns what was likely there."""


def fitting(num_prompt: int, max_tokens: int | None, max_model_len: int, field: str) -> int:
    """Return how long an answer may become, ``max_tokens`` or what fits. Raises `RequestError` where that is too long."""
    room = max_model_len - num_prompt
    if room < (1 if max_tokens is None else max_tokens):
        raise RequestError(
            ErrorCode.TOO_LONG,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + (max_tokens or 1)} tokens ({num_prompt} in the {field}, {max_tokens or 1} in the completion). "
            f"Please reduce the length of the {field} or completion.",
            field if room < 1 else "max_tokens",
        )
    return room if max_tokens is None else max_tokens


async def search(
    prompts: Sequence[Sequence[int]], options: Sequence[BeamOptions], ask: Ask
) -> list[list[Beam]]:
    """Return the answers to each prompt, best first: as many as it has beams. Raises what ``ask`` raises."""
    searches = [BeamSearch(each) for each in options]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        logprobs=max(each.num_candidates for each in options),
    )
    while running := [
        (prompt, each) for prompt, each in zip(prompts, searches, strict=True) if not each.is_over
    ]:
        behind = [
            TokenPrompt(pack_i32([*prompt, *beam.token_ids]))
            for prompt, each in running
            for beam in each.running
        ]
        found = iter(await ask(behind, params))
        for _, each in running:
            each.advance([next(found) for _ in each.running])
    return [each.finished for each in searches]


def telling(beam: Beam, params: SamplingParams) -> SamplingParams:
    """Return the parameters with which an answer that was found is told, and ends where it does."""
    return SamplingParams(
        max_tokens=len(beam.token_ids),
        temperature=0.0,
        seed=0,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
