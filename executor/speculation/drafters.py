"""Sources of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quintet.wire.config import SpeculativeConfig

Tokens = NDArray[np.int32]


class Drafter(Protocol):
    """Source of draft tokens."""

    def propose(self, tokens: Tokens, most: int) -> Tokens:
        """Return at most ``most`` tokens that may follow ``tokens``, the prompt and outputs of a request."""


class NgramDrafter:
    """Prompt lookup: the tokens that followed the last earlier occurrence of the newest tokens.

    The longest suffix of ``longest`` to ``shortest`` tokens that occurs earlier is used. The search takes one pass over
    the tokens of the request.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, tokens: Tokens, most: int) -> Tokens:
        """See `Drafter.propose`."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of occurrences of the newest token
        length = 1
        found = ends if length >= self._shortest else ends[:0]
        while len(ends) and length < self._longest:
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]] if length < len(tokens) else ends[:0]
            length += 1
            if len(ends) and length >= self._shortest:
                found = ends
        if not len(found):
            return tokens[:0]
        begin = int(found[-1]) + 1
        return tokens[begin + np.arange(most) % (len(tokens) - begin)]  # an overlapping copy repeats the text


DRAFTERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "ngram": lambda config: NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max),
}
"""Drafters by `SpeculativeConfig.method`."""
