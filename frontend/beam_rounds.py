"""Beam search over the engine: each round sends one single-token request per running beam.

Shared prefixes hit the prefix cache, so a round computes little more than the new tokens. The requests are ordinary ones
and survive process losses; the result depends only on tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from quintet.frontend.beam_search import Beam, BeamOptions, BeamSearch
from quintet.wire.codec import pack_i32
from quintet.wire.messages import PositionLogprobs, TokenPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import check_length

Ask = Callable[[Sequence[TokenPrompt], SamplingParams], Awaitable[Sequence[PositionLogprobs]]]
"""Samples one token after each prompt, and returns its log-probabilities with the most likely alternatives."""


def output_limit(num_prompt: int, max_tokens: int | None, max_model_len: int, field: str) -> int:
    """Return the output limit: ``max_tokens``, or the rest of the context. Raises `RequestError` if it does not fit."""
    check_length(num_prompt, max_model_len, field, max_tokens)
    return max_model_len - num_prompt if max_tokens is None else max_tokens


async def search(
    prompts: Sequence[Sequence[int]], options: Sequence[BeamOptions], ask: Ask
) -> list[list[Beam]]:
    """Return the finished beams of each prompt, best first; as many as its width. Raises what ``ask`` raises."""
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
        extended = [
            TokenPrompt(pack_i32([*prompt, *beam.token_ids]))
            for prompt, each in running
            for beam in each.running
        ]
        found = iter(await ask(extended, params))
        for _, each in running:
            each.advance([next(found) for _ in each.running])
    return [each.finished for each in searches]


def replay_params(beam: Beam, params: SamplingParams) -> SamplingParams:
    """Return parameters that generate a found beam's tokens and end where it ends."""
    return SamplingParams(
        max_tokens=len(beam.token_ids),
        temperature=0.0,
        seed=0,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
