"""``best_of``: the best of more choices than are returned."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quintet.frontend.api.openai.types import GenerationBody
from quintet.frontend.api.outputs import Output
from quintet.wire.errors import invalid
from quintet.wire.params import SamplingParams, shown


def rankable(params: SamplingParams, body: GenerationBody) -> SamplingParams:
    """Return parameters with log-probabilities if `best_choices` needs them. Raises `RequestError`."""
    if not _drops_choices(body):
        return params
    if body.stream:
        raise invalid(
            f"best_of is {body.best_of} and stream is true; the best choices are known only at the end. Set stream to "
            "false, or best_of to n.",
            "best_of",
        )
    return params if params.logprobs is not None else msgspec.structs.replace(params, logprobs=0)


def best_choices(outputs: Sequence[Output], body: GenerationBody) -> list[Output]:
    """Return the ``n`` of each prompt's ``best_of`` choices with the highest total log-probability, best first."""
    if not _drops_choices(body):
        return list(outputs)
    n, best_of = body.n or 1, body.best_of or 1
    chosen: list[Output] = []
    for first in range(0, len(outputs), best_of):
        each = outputs[first : first + best_of]
        chosen += sorted(each, key=lambda output: -sum(p.chosen.logprob for p in output.logprobs))[:n]
    for index, output in enumerate(chosen):
        output.index = index
    return chosen


def _drops_choices(body: GenerationBody) -> bool:
    return body.best_of is not None and body.best_of > num_returned(body)


def num_returned(body: GenerationBody) -> int:
    """Return the number of choices in the response. Raises `RequestError` if ``best_of`` is less."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of < n:
        raise invalid(f"best_of is {shown(body.best_of)}; it must be at least n ({n}).", "best_of")
    return n
