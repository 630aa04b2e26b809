"""Beam search: each round sends one single-token request per running beam.

Shared prefixes hit the prefix cache, so a round computes little more than the new tokens. The requests are ordinary ones
and survive process losses; the result depends only on tokens.

Equal to ``generate(num_beams=…)`` of transformers 5. Of the ``width * max(2, 1 + ends)`` best continuations, an end among the
``width`` best finishes a beam, and the others without an end continue. A finished beam's score is its log-probability
divided by length to the power of ``length_penalty``.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quintet.wire.codec import pack_i32
from quintet.wire.errors import RequestError, invalid
from quintet.wire.limits import MAX_BEAM_CANDIDATES
from quintet.wire.messages import Alternative, PositionLogprobs, TokenPrompt
from quintet.wire.params import SamplingParams, shown
from quintet.wire.request import check_length

MAX_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0

EarlyStopping = bool | Literal["never"]
Ask = Callable[[Sequence[TokenPrompt], SamplingParams], Awaitable[Sequence[PositionLogprobs]]]
"""Samples one token after each prompt, and returns its log-probabilities with the most likely alternatives."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search. Raises `RequestError` for a value out of range, with the client's field name."""

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    """True: stop at ``width`` finished beams. False: stop when no running beam is likely to score higher. ``never``: stop when
    none can score higher at any length."""
    ends: frozenset[int] = frozenset()
    """Token ids that end a beam."""
    num_shown: int = 0
    """Alternatives to return per position."""
    width_field: str = "n"

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_WIDTH:
            raise _bad(self.width_field, self.width, f"between 1 and {MAX_WIDTH} with beam search")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:  # also rejects NaN
            what = f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            raise _bad("length_penalty", self.length_penalty, what)
        if self.early_stopping not in (True, False, "never"):
            raise _bad("early_stopping", self.early_stopping, "true, false or 'never'")
        if self.num_candidates > MAX_BEAM_CANDIDATES:
            raise invalid(
                f"stop_token_ids has so many tokens that beam search needs {self.num_candidates} candidates; the "
                f"limit is {MAX_BEAM_CANDIDATES}. Send fewer, or lower {self.width_field}.",
                "stop_token_ids",
            )

    @property
    def num_candidates(self) -> int:
        """Candidates per step: enough that ``width`` of them do not end."""
        return max(2, 1 + len(self.ends)) * self.width


@dataclass(slots=True)
class Beam:
    """A running or finished beam."""

    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    """Sum over its tokens."""
    positions: list[PositionLogprobs] = field(default_factory=list)
    """One per token, with the most likely alternatives."""
    score: float = -math.inf
    """Log-probability of a finished beam, normalized by length."""


@dataclass(slots=True)
class _Candidate:
    beam: Beam
    position: PositionLogprobs
    chosen: Alternative
    logprob: float

    def as_beam(self, num_shown: int) -> Beam:
        before = self.beam.positions
        begin = before[-1].text_offset + len(before[-1].chosen.token) if before else 0
        position = PositionLogprobs(self.chosen, self.position.top[:num_shown], begin)
        return Beam([*self.beam.token_ids, self.chosen.token_id], self.logprob, [*before, position])


class BeamSearch:
    """Beam search of one prompt. Compute the continuations of ``running`` and `advance`, until `is_over`."""

    def __init__(self, options: BeamOptions) -> None:
        self.options = options
        self.running = [Beam()]
        """Best first."""
        self.finished: list[Beam] = []
        """Best first; at most ``width``."""
        self.is_over = False

    def advance(self, positions: Sequence[PositionLogprobs]) -> None:
        """Extend the beams by one token. ``positions``: continuations of each running beam, likeliest `num_candidates` first."""
        options = self.options
        found = [
            _Candidate(beam, position, each, beam.logprob + each.logprob)
            for beam, position in zip(self.running, positions, strict=True)
            for each in position.top
        ]
        found.sort(key=lambda each: -each.logprob)
        del found[options.num_candidates :]
        length = len(self.running[0].token_ids) + 1
        is_last = length == options.max_tokens
        ending = [is_last or each.chosen.token_id in options.ends for each in found]
        for candidate, has_ended in zip(found[: options.width], ending, strict=False):
            if has_ended:
                beam = candidate.as_beam(options.num_shown)
                beam.score = beam.logprob / length**options.length_penalty
                self.finished.append(beam)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[options.width :]
        continuing = [each for each, has_ended in zip(found, ending, strict=True) if not has_ended]
        self.running = [each.as_beam(options.num_shown) for each in continuing[: options.width]]
        self.is_over = not self.running or self._is_decided(length)

    def _is_decided(self, length: int) -> bool:
        """True if ``width`` beams are finished and no running beam is expected to score above the worst of them."""
        options = self.options
        if len(self.finished) < options.width:
            return False
        if options.early_stopping is True or options.width == 1:  # one beam is greedy search
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_tokens
        best_possible = self.running[0].logprob / float(length) ** options.length_penalty
        return bool(best_possible <= self.finished[-1].score)


def _bad(field: str, value: object, allowed: str) -> RequestError:
    return invalid(f"{field} is {shown(value)}; it must be {allowed}.", field)


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
        **params.text_params,
    )
