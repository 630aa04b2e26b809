"""Repetition detection: ends a request when its outputs repeat."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.wire.params import RepetitionDetectionParams


class Repetition:
    """Detector of one request: per pattern size, the length of the current periodic run.

    A function of the outputs alone, read in any portions. So a recomputed request ends at the same token.
    """

    __slots__ = ("_least", "_num_read", "_runs", "_times")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least = max(1, params.min_pattern_size)
        self._times = params.min_count - 1
        self._runs = [0] * (params.max_pattern_size - self._least + 1)
        self._num_read = 0

    def has_repeated(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Read the new outputs after ``num_prompt``; return True when they end with a pattern repeated often enough."""
        runs, least = self._runs, self._least
        for position in range(num_prompt + self._num_read, len(tokens)):
            token = tokens[position]
            for index in range(min(len(runs), position - num_prompt - least + 1)):
                runs[index] = runs[index] + 1 if tokens[position - least - index] == token else 0
        self._num_read = len(tokens) - num_prompt
        return any(run >= (least + index) * self._times for index, run in enumerate(runs))
