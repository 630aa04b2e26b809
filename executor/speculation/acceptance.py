"""Acceptance of drafts: a draft is accepted if it and all before it equal the draws at their positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quintet.executor.speculation.gram_index import Tokens
from quintet.wire.step import StepResult, TokenLogprobs


def accept(
    result: StepResult, samples: NDArray[np.uint8], drafts: list[tuple[int, Tokens]]
) -> NDArray[np.uint8]:
    """Remove rejected tokens from the result. Return the number of tokens of each row, at least 1 where it draws."""
    num_tokens = samples.copy()
    tokens = np.frombuffer(result.token_ids, np.int32)
    first_draws = np.cumsum(samples.astype(np.int64)) - samples
    is_kept = np.ones(len(tokens), np.bool_)
    for row, proposed in drafts:
        first, end = int(first_draws[row]), int(first_draws[row]) + len(proposed)
        differs = np.flatnonzero(tokens[first:end] != proposed)
        num_accepted = int(differs[0]) if len(differs) else len(proposed)
        is_kept[first + num_accepted + 1 : end + 1] = False
        num_tokens[row] = 1 + num_accepted
    result.token_ids = tokens[is_kept].tobytes()
    num_left = num_tokens.tolist()
    kept: list[TokenLogprobs] = []
    for entry in result.logprobs:
        num_left[entry.row] -= 1
        if num_left[entry.row] >= 0:
            kept.append(entry)
    result.logprobs = kept
    return num_tokens
