"""Quantization loss of a model on a text: nats per token, and the share of equal greedy tokens.

Measured through the Python API, with the kernels and processes of serving. Losses are comparable on the same text and model
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.deploy.python_api.offline import LLM
from quintet.deploy.python_api.outputs import Position
from quintet.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Score:
    name: str
    nats_per_token: float
    same_choice: float
    """Share of positions with the same most likely token as the first variant."""
    num_tokens: int


def measure(
    variants: Mapping[str, Mapping[str, Any]], prompts: Sequence[list[int]], progress: bool = False
) -> Iterator[Score]:
    """Yield the score of each variant; the first one is the baseline. ``variants``: name -> options of `LLM`."""
    reference: list[int] = []
    for name, options in variants.items():
        logprobs, choices = read(prompts, options, progress)
        reference = reference or choices
        same = sum(ours == theirs for ours, theirs in zip(choices, reference, strict=True))
        yield Score(name, -sum(logprobs) / len(logprobs), same / len(choices), len(choices))


def read(
    prompts: Sequence[list[int]], options: Mapping[str, Any], progress: bool
) -> tuple[list[float], list[int]]:
    """Return the log-probability of each prompt token, and the most likely token at its position."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    logprobs, choices = [], []
    with LLM(**options) as llm:
        for output in llm.generate(list(prompts), params, use_tqdm=progress):
            for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
                if position is not None:
                    logprobs.append(position[token_id].logprob)
                    choices.append(most_likely(position))
    return logprobs, choices


def most_likely(position: Position) -> int:
    return next(token_id for token_id, entry in position.items() if entry.rank == 1)


def table(scores: Sequence[Score], title: str = "weights, KV") -> str:
    """Format the scores as a Markdown table."""
    base = scores[0]
    lines = [
        f"| {title} | nats per token | more than {base.name} | same greedy choice |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {score.name} | {score.nats_per_token:.4f} | {score.nats_per_token - base.nats_per_token:+.4f} |"
        f" {score.same_choice:.2%} |"
        for score in scores
    ]
    return "\n".join(lines)
