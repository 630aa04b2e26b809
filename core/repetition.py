"""Whether outputs have begun to go round in circles, for requests that want to end then."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.wire.params import RepetitionDetectionParams


class Repetition:
    """Of one request: for each size of a pattern how long the outputs have repeated what stood that far before.

    A function of the outputs alone, which may be read in any portions: whoever computes the request again ends it where it
    would have ended.
    """

    __slots__ = ("_least", "_num_read", "_runs", "_times")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least = max(1, params.min_pattern_size)
        self._times = params.min_count - 1
        self._runs = [0] * (params.max_pattern_size - self._least + 1)
        self._num_read = 0

    def has_come(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Read the outputs behind ``num_prompt`` that are new; return whether they end with a pattern, often enough."""
        runs, least = self._runs, self._least
        for position in range(num_prompt + self._num_read, len(tokens)):
            token = tokens[position]
            for index in range(min(len(runs), position - num_prompt - least + 1)):
                runs[index] = runs[index] + 1 if tokens[position - least - index] == token else 0
        self._num_read = len(tokens) - num_prompt
        return any(run >= (least + index) * self._times for index, run in enumerate(runs))
