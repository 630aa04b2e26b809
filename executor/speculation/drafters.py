"""Sources of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int
from quintet.executor.slots import SlotTables
from quintet.wire.config import SpeculativeConfig
from quintet.wire.step import StepPlan

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a step that can verify drafts. Each column is int64[N]."""

    slots: Int
    num_tokens: Int
    """Known tokens of each slot: the prompt and the outputs."""
    counts: Int
    """Maximum number of drafts of each row, at least 1."""


class Drafter(Protocol):
    """Source of draft tokens."""

    @property
    def step_time(self) -> tuple[float, float]:
        """Measured seconds of proposing one more token for all rows: a fixed part, and one per row. Zeros if negligible."""

    def note(self, plan: StepPlan) -> None:
        """Note the deltas and rows of each plan, before `propose` for its rows. The slot tables hold the deltas."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """Return, for each row, up to ``counts`` tokens that may follow the known ones."""


class NgramDrafter:
    """Prompt lookup: the tokens that followed the last earlier occurrence of the newest tokens.

    The longest suffix of ``longest`` to ``shortest`` tokens that occurs earlier is used. The search takes one pass over
    the tokens of the request.
    """

    def __init__(self, tables: SlotTables, shortest: int, longest: int) -> None:
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._shortest, self._longest = shortest, longest

    @property
    def step_time(self) -> tuple[float, float]:
        """See `Drafter.step_time`."""
        return 0.0, 0.0

    def note(self, plan: StepPlan) -> None:
        """See `Drafter.note`."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`."""
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [
            self.lookup(self._token_ids[slot, :num_tokens], most)
            for slot, num_tokens, most in zip(*columns, strict=True)
        ]

    def lookup(self, tokens: Tokens, most: int) -> Tokens:
        """Return at most ``most`` tokens that may follow ``tokens``."""
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


DRAFTERS: dict[str, Callable[[SpeculativeConfig, SlotTables], Drafter]] = {
    "ngram": lambda config, tables: NgramDrafter(tables, config.prompt_lookup_min, config.prompt_lookup_max),
}
"""Drafters without a model, by `SpeculativeConfig.method`."""
